"""What an operator would have given in FP32: computed again from the same inputs, and followed from there.

Only functional operators that draw no random numbers are computed again; nothing of the run is touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from halfstep.watch.look import Operation
from halfstep.watch.ranges import HALF, Held, address, held


class Kind(NamedTuple):
    """What must be known of an operator's schema."""

    name: str
    view: bool  # its output shares an input's storage
    mutable: bool
    listed: bool  # it writes to lists of tensors
    random: bool


_kinds: dict[Any, Kind] = {}


def kind_of(func: Any) -> Kind:
    kind = _kinds.get(func)
    if kind is None:
        schema = func._schema
        aliases = [a.alias_info for a in schema.arguments]
        kind = _kinds[func] = Kind(
            str(schema.name).split("::")[-1],
            not schema.is_mutable and any(r.alias_info is not None for r in schema.returns),
            bool(schema.is_mutable),
            any(
                info is not None and info.is_write and "List" in str(a.type)
                for a, info in zip(schema.arguments, aliases, strict=True)
            ),
            torch.Tag.nondeterministic_seeded in func.tags,
        )
    return kind


def widened(value: Any) -> Any:
    """FP32 for what is half: tensors and dtypes."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value


def computed(operation: Operation, shadows: Shadows | None = None) -> Any:
    """The operator's result with FP32 inputs (their shadows where they have some); None where that cannot be had."""
    kind = kind_of(operation.func)
    if kind.mutable or kind.random:
        return None

    def wide(value: Any) -> Any:
        if shadows is not None and isinstance(value, torch.Tensor):
            known = shadows.of(value)
            if known is not None:
                return known
        return widened(value)

    try:
        with torch.no_grad(), torch._C._DisableAutocast():
            return operation.func(
                *tree_map(wide, tuple(operation.args)), **{k: tree_map(wide, v) for k, v in operation.kwargs.items()}
            )
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


class Shadows:
    """FP32 twins of tensors, kept while those live: at most ``room`` elements together."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._left = room
        self._kept: dict[tuple[Any, ...], tuple[Held, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        known = self._kept.get(_view(tensor)) if self._kept else None
        return None if known is None else known[1]

    def keep(self, tensor: torch.Tensor, exact: torch.Tensor) -> bool:
        """Whether there was room for it."""
        if tensor.shape != exact.shape or tensor.layout is not torch.strided:
            return False
        if exact.numel() > self._left:
            self.prune()
            if exact.numel() > self._left:
                return False
        self._left -= exact.numel()
        self._kept[_view(tensor)] = (held(tensor), exact)
        return True

    def prune(self) -> None:
        for key, (reference, exact) in list(self._kept.items()):
            if reference.expired():
                del self._kept[key]
                self._left += exact.numel()

    def clear(self) -> None:
        self._kept.clear()
        self._left = self._room


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
