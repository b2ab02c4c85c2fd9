"""The big batch: several micro-batches joined along their leading dimension, whatever they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import PolicyError


def joined(batches: Sequence[Any]) -> Any:
    """The batches as one: tensors concatenated along dimension 0, mappings, tuples, lists and dataclasses by member.

    Lists of other things (strings, ids) are strung together. What is not an example's (a number, a string, None, a
    tensor without dimensions) must be the same in every batch and is kept. Raises
    :class:`~halfstep.errors.PolicyError` where that cannot be done without guessing, above all for tensors whose
    other dimensions differ: padding is a decision only the caller can take.
    """
    return _joined(list(batches), "batch")


def _joined(values: list[Any], path: str) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise _cannot(path, f"is {' here and '.join(kinds)} there")
    if isinstance(first, Tensor):
        return _joined_tensors(values, path)
    if isinstance(first, Mapping):
        if any(list(value) != list(first) for value in values):
            raise _cannot(path, "has other keys in some micro-batches")
        members = {key: _joined([value[key] for value in values], f"{path}[{key!r}]") for key in first}
        return members if isinstance(first, dict) and type(first) is dict else type(first)(members)  # type: ignore[call-arg]
    if isinstance(first, list) and not any(_is_part(item) for value in values for item in value):
        return [item for value in values for item in value]
    if isinstance(first, tuple | list):
        if any(len(value) != len(first) for value in values):
            raise _cannot(path, f"has {', '.join(str(len(value)) for value in values)} members")
        return _rebuilt(first, [_joined(list(column), f"{path}[{i}]") for i, column in enumerate(zip(*values))])  # noqa: B905
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [entry.name for entry in dataclasses.fields(first) if entry.init]
        parts = {name: _joined([getattr(value, name) for value in values], f"{path}.{name}") for name in names}
        return dataclasses.replace(first, **parts)
    if all(value == first for value in values):
        return first
    raise _cannot(path, f"is {first!r} in one micro-batch and something else in another")


def _joined_tensors(tensors: list[Tensor], path: str) -> Tensor:
    if tensors[0].dim() == 0:
        if all(torch.equal(tensor, tensors[0]) for tensor in tensors):
            return tensors[0]
        raise _cannot(path, "has no dimensions and differs between micro-batches")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(shape[1:] != shapes[0][1:] for shape in shapes):
        raise _cannot(path, f"has the shapes {', '.join(map(str, shapes))}, which fit together only after padding")
    return torch.cat(tensors)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor in it replaced by ``function`` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        members = {key: mapped(member, function) for key, member in value.items()}
        return members if type(value) is dict else type(value)(members)  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return _rebuilt(value, [mapped(item, function) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in dataclasses.fields(value) if entry.init]
        return dataclasses.replace(value, **{name: mapped(getattr(value, name), function) for name in names})
    return value


def _is_part(value: Any) -> bool:
    """Whether a list that holds this is one micro-batch's parts (and not a list with one entry per example)."""
    return isinstance(value, Tensor | Mapping | list | tuple) or dataclasses.is_dataclass(value)


def _rebuilt(like: Any, items: list[Any]) -> Any:
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _cannot(path: str, why: str) -> PolicyError:
    return PolicyError(f"the micro-batches cannot be joined: {path} {why}", "pass the big batch yourself, as big=…")
