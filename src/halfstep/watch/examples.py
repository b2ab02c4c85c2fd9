"""Examples: one number for each, from its content alone, so that ranks can be compared afterwards by their records.

Only where several ranks train together, and only in some updates, the same ones on every rank. Nothing is read then:
a few integer operations on the examples' own device, exact and in any order, so that equal content gives equal numbers.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler, dataloader

from halfstep.events import ExamplesSeen, Place
from halfstep.watch.loaders import Loaders, innermost
from halfstep.watch.modules import Modules, plain_tensors
from halfstep.watch.patches import Patches
from halfstep.watch.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.watch.session import Session

_DENSE = 64  # updates looked at, then _SPELL after each power of two
_SPELL = 8
_ROWS = 256  # examples of a micro-batch
_WIDTH = 2048  # numbers of an example, spread evenly over it
_BITS = (1 << 48) - 1  # what a float64 carries on its way to the host
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Examples:
    def __init__(self, session: Session, modules: Modules, replicas: Replicas, loaders: Loaders) -> None:
        self._session = session
        self._replicas = replicas
        self._loaders = loaders
        self._made: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()
        self._loader_of: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._taken: tuple[int, Place | None, Any] | None = None  # contributions begun, where made, sampler
        modules.entries.append(self._called)

    def install(self, patches: Patches) -> None:
        patches.around(DataLoader, "__init__", None, self._after_made)
        base = dataloader._BaseDataLoaderIter
        patches.around(base, "__init__", None, self._after_begin)
        patches.around(base, "__next__", None, self._after_next)

    def _after_made(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made[args[0]] = self._session.place()

    def _after_begin(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loader = kwargs.get("loader", args[1] if len(args) > 1 else None)
        if isinstance(loader, DataLoader):
            self._loader_of[args[0]] = weakref.ref(loader)

    def _after_next(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._replicas.together:
            return
        ref = self._loader_of.get(args[0])
        loader = None if ref is None else ref()
        if loader is not None:
            self._taken = self._session.stream.micro, self._made.get(loader), innermost(loader)

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any, at: Place | None) -> None:
        updates = self._session.look.updates
        if not self._replicas.together or not torch.is_grad_enabled() or not module.training:
            return
        if updates >= _DENSE and updates - (1 << updates.bit_length() - 1) >= _SPELL:
            return
        rows = marks(plain_tensors((*args, *kwargs.values())))
        if rows is None:
            return
        numbers, width, integers = rows
        micro = self._session.stream.micro
        source, sampler, repeats = "call", "", False
        if self._taken is not None and self._taken[0] == micro:
            at, drawn = self._taken[1] or at, self._taken[2]
            source, sampler = "loader", type(drawn).__name__
            repeats = isinstance(drawn, WeightedRandomSampler | RandomSampler) and bool(drawn.replacement)
        elif (place := self._loaders.drawn_at()) is not None:
            source, at = "order", place
        draft = self._session.stream.emit(
            ExamplesSeen,
            at=at,
            contribution=micro + 1,
            width=width,
            integers=integers,
            source=source,
            sampler=sampler,
            repeats=repeats,
        )
        draft.tensors = list(numbers.unbind(0))

        def finish(fields: dict[str, Any], values: Sequence[float]) -> None:
            fields["rows"] = tuple(int(v) for v in values)

        draft.finish = finish


def marks(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, int, bool] | None:
    """A number for each example (0 where all its values are equal), how many values it has, whether they are whole.

    Examples lie along the first dimension, which all tensors that count share with the first.
    """
    batched = [t.detach() for t in tensors if t.dim() and not t.is_complex() and t.device.type not in ("meta", "mps")]
    if not batched or not batched[0].shape[0]:
        return None
    count = batched[0].shape[0]
    parts = [t[:_ROWS].reshape(min(count, _ROWS), -1) for t in batched if t.shape[0] == count and t[0].numel()]
    if not parts:
        return None
    with torch.no_grad():
        total = torch.zeros(parts[0].shape[0], dtype=torch.int64, device=parts[0].device)
        flat = torch.ones_like(total, dtype=torch.bool)
        for number, part in enumerate(p for p in parts if p.device == total.device):
            few = part[:, :: max(1, part.shape[1] // _WIDTH)]
            if few.is_floating_point():
                few = few.contiguous().view(_INTEGERS[few.element_size()])
            few = few.to(torch.int64)
            flat &= (few == few[:, :1]).all(1)
            total += (few * _weights(few.shape[1], number, few.device)).sum(1)
        total ^= total >> 23
        width = sum(p.shape[1] for p in parts)
        alone = flat & (width > 1)
        return (total & _BITS).masked_fill(alone, 0), width, not any(p.is_floating_point() for p in parts)


def _weights(count: int, number: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that differ from each other in many bits; products and sums of them wrap around."""
    weights = torch.arange(1 + number * 7919, 1 + number * 7919 + count, device=device, dtype=torch.int64)
    weights = weights * -7046029254386353131  # 2^64 / golden ratio, as a signed number
    weights = (weights ^ (weights >> 29)) * -4658895280553007687
    return (weights ^ (weights >> 32)) | 1
