"""Overflows that leave the loss finite: a later operator hides the infinity, and its output is wrong.

A value that leaves the range of half precision is followed in FP32 until an operator gives a finite output all the
same. Where FP32 gives that operator the same output (a softmax over a mask, a clamp, a saturated sigmoid) nothing was
lost; where it does not (1 / inf is 0), the elements concerned are wrong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from halfstep.watch.exact import Shadows, computed, kind_of
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.provenance import Origin, Provenance
from halfstep.watch.ranges import HALF, measurable

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_ROOM = 1 << 24
_FOLLOWED = 128  # operators computed again in one micro-batch
_APART = 0.05  # how far an element may lie from its FP32 twin, relative to it
_FAR = 12  # operators that a wrong value is followed through, to see whether it is right again
_SMALL = 1e-4  # elements so much smaller than the largest do not matter


class Ruin(NamedTuple):
    """An overflow, the operator that hid it, the share of that one's output that is wrong, and where it went on."""

    cause: Origin
    hidden_by: Origin
    share: float
    reached: Origin


class _Trail(NamedTuple):
    """How a followed value came about: from which overflow, hidden by which operator, so many operators ago."""

    cause: Origin
    hidden_by: Origin | None = None
    share: float = 0.0
    length: int = 0


class Silence:
    def __init__(self, session: Session, provenance: Provenance) -> None:
        self._session = session
        self._provenance = provenance
        self._shadows = Shadows(_ROOM)
        self._trails: dict[int, tuple[Origin, _Trail]] = {}  # id of an origin that is followed -> it, its trail
        self._ends: dict[int, tuple[Origin, _Trail]] = {}  # wrong values that nothing has been computed of yet
        self._followed = 0

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        if operation.backward:
            return
        if self._shadows:
            self._follow(operation)
        origin = self._provenance.now
        if origin is None or origin.finite or origin.bad or origin.nan or origin.dtype not in HALF:
            return
        exact = origin.facts.get("exact")
        if exact is None or not math.isfinite(exact) or not isinstance(operation.out, torch.Tensor):
            return
        twin = computed(operation)
        if isinstance(twin, torch.Tensor) and self._shadows.keep(operation.out, twin):
            self._trails[id(origin)] = (origin, _Trail(origin))

    def _follow(self, operation: Operation) -> None:
        shadowed = [t for t in operation.tensors() if self._shadows.of(t) is not None]
        out = operation.out
        if not shadowed or self._followed >= _FOLLOWED or not isinstance(out, torch.Tensor):
            return
        self._followed += 1
        twin = computed(operation, self._shadows)
        if not isinstance(twin, torch.Tensor) or twin.shape != out.shape:
            return
        origin = self._provenance.now
        if kind_of(operation.func).view or origin is None:
            self._shadows.keep(out, twin)
            return
        sources = [s for s in map(self._provenance.of, shadowed) if s is not None]
        trail = next((self._trails[id(s)][1] for s in sources if id(s) in self._trails), None)
        if trail is None or not bool(torch.isfinite(twin).all()):
            return
        if origin.finite and trail.hidden_by is not None and 2 * out.numel() <= max(t.numel() for t in shadowed):
            return  # few wrong elements are no longer seen in a sum of many: they are wrong all the same
        if origin.finite and measurable(out):
            share = _apart(out, twin)
            for source in sources:
                self._ends.pop(id(source), None)  # what became of it counts
            if share == 0.0:
                return
            hidden_by = trail.hidden_by or origin
            trail = _Trail(trail.cause, hidden_by, trail.share or share, trail.length + 1)
            self._ends[id(origin)] = (origin, trail)
            if trail.length >= _FAR:
                return
        if self._shadows.keep(out, twin):
            self._trails[id(origin)] = (origin, trail)

    def ruined(self) -> list[Ruin]:
        """The overflows whose traces are still there, in order."""
        return [
            Ruin(trail.cause, trail.hidden_by, trail.share, end)
            for end, trail in self._ends.values()
            if trail.hidden_by is not None
        ]

    def clear(self) -> None:
        self._shadows.clear()
        self._trails.clear()
        self._ends.clear()
        self._followed = 0


def _apart(out: torch.Tensor, twin: torch.Tensor) -> float:
    """The share of elements that are not what FP32 gives."""
    twin = twin.float()
    size = twin.abs()
    far = ((out.float() - twin).abs() > _APART * size) & (size > _SMALL * size.amax())
    return float(far.float().mean())
