"""Integers that become one in half precision: positions, counters, diffusion times.

BF16 holds every integer up to 256, FP16 up to 2048; beyond, neighbours are rounded together. Data may be rounded so
without harm; positions may not: so what is told is a sequence that lost some of its members, or integers whose sines
are taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Place, PositionsCollided
from halfstep.watch.exact import computed
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.provenance import Origin, Provenance
from halfstep.watch.ranges import HALF

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_CASTS = frozenset(("_to_copy", "copy_"))
_MAKERS = frozenset(("arange", "linspace", "cumsum"))
_WAVES = frozenset(("sin", "cos", "sin_", "cos_", "polar"))
_ELEMENTS = 1 << 20
_FEW = 4  # members that make a sequence
_NEAR = 6
_TIMES = 64  # told for each line


class Positions:
    def __init__(self, session: Session, provenance: Provenance) -> None:
        self._session = session
        self._provenance = provenance
        self._told: dict[tuple[Place | None, str], int] = {}

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        origin = self._provenance.now
        if origin is None or operation.backward or not origin.finite:
            return
        name = origin.name
        if name in _WAVES:
            rounded = next((o for o in origin.upstream(_NEAR) if "rounded" in o.facts), None)
            if rounded is not None:
                self._tell(rounded, rounded.facts["rounded"])
        elif (name in _CASTS or name in _MAKERS) and origin.dtype in HALF and origin.peak > _exact(origin.dtype):
            self._compare(operation, origin, name)

    def _compare(self, operation: Operation, origin: Origin, name: str) -> None:
        out = operation.out
        if not isinstance(out, torch.Tensor) or out.numel() > _ELEMENTS:
            return
        source = operation.args[1 if name == "copy_" else 0] if name in _CASTS else computed(operation)
        if not isinstance(source, torch.Tensor) or source.dtype in HALF or source.shape != out.shape:
            return
        whole = not source.is_floating_point()
        for lane in _lanes(source):
            if whole or bool((lane == lane.round()).all()):
                facts = _sequence(lane.double(), out.dtype, counting=name == "cumsum")
                if facts is not None:
                    self._tell(origin, facts)
                    return
        if whole and name in _CASTS and bool((source.double() != out.double()).any()):
            values = source.double().flatten()
            origin.facts["rounded"] = _facts(values, values.to(out.dtype).double())

    def _tell(self, origin: Origin, facts: dict[str, Any]) -> None:
        key = (origin.at, origin.name)
        self._told[key] = self._told.get(key, 0) + 1
        if self._told[key] > _TIMES:
            return
        self._session.stream.emit(
            PositionsCollided,
            at=origin.at,
            dtype=str(origin.dtype).removeprefix("torch."),
            operator=origin.name,
            module=origin.path,
            **facts,
        )


def _exact(dtype: torch.dtype) -> float:
    """Up to here every integer has its own number."""
    return 2.0 / torch.finfo(dtype).eps


def _lanes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """One line of elements along each dimension."""
    lanes = []
    for dim in range(tensor.dim()):
        if tensor.shape[dim] >= _FEW and tensor.stride(dim):
            index: list[Any] = [0] * tensor.dim()
            index[dim] = slice(None)
            lanes.append(tensor[tuple(index)])
    return lanes


def _sequence(lane: torch.Tensor, dtype: torch.dtype, counting: bool) -> dict[str, Any] | None:
    """Whether these integers follow each other at one distance, and some became one in ``dtype``."""
    gaps = lane.diff()
    regular = bool((gaps == gaps[0]).all()) and float(gaps[0]) != 0.0
    if not regular and not (counting and bool((gaps >= 0).all())):
        return None
    rounded = lane.to(dtype).double()
    facts = _facts(lane, rounded)
    return facts if facts["distinct"] < facts["count"] else None


def _facts(values: torch.Tensor, rounded: torch.Tensor) -> dict[str, Any]:
    order = torch.argsort(values)
    exact, after = values[order], rounded[order]
    same = (after.diff() == 0) & (exact.diff() != 0)
    first = None
    if bool(same.any()):
        index = int(same.to(torch.uint8).argmax())
        first = (float(exact[index]), float(exact[index + 1]))
    return {
        "count": int(torch.unique(exact).numel()),
        "distinct": int(torch.unique(after).numel()),
        "largest": float(values.abs().amax()),
        "first": first,
    }
