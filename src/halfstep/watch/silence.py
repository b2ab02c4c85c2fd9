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
_SMALL = 1e-4  # elements so much smaller than the largest do not matter


class Ruin(NamedTuple):
    """The operator that hid an infinity: its origin, and the share of its output that is wrong."""

    origin: Origin
    share: float


class Silence:
    def __init__(self, session: Session, provenance: Provenance) -> None:
        self._session = session
        self._provenance = provenance
        self._shadows = Shadows(_ROOM)
        self._causes: dict[int, Origin] = {}  # id of an origin that is followed -> the overflow it came from
        self._followed = 0
        self.ruined: list[tuple[Origin, Ruin]] = []

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
            self._causes[id(origin)] = origin

    def _follow(self, operation: Operation) -> None:
        shadowed = [t for t in operation.tensors() if self._shadows.of(t) is not None]
        if not shadowed or self._followed >= _FOLLOWED or not isinstance(operation.out, torch.Tensor):
            return
        self._followed += 1
        twin = computed(operation, self._shadows)
        if not isinstance(twin, torch.Tensor) or twin.shape != operation.out.shape:
            return
        origin = self._provenance.now
        if kind_of(operation.func).view or origin is None:
            self._shadows.keep(operation.out, twin)
            return
        cause = next((c for t in shadowed for c in self._cause(t)), None)
        if cause is None or not bool(torch.isfinite(twin).all()):
            return
        if not origin.finite:
            if self._shadows.keep(operation.out, twin):
                self._causes[id(origin)] = cause
            return
        if measurable(operation.out):
            share = _apart(operation.out, twin)
            if share > 0.0:
                self.ruined.append((cause, Ruin(origin, share)))

    def _cause(self, tensor: torch.Tensor) -> list[Origin]:
        origin = self._provenance.of(tensor)
        cause = None if origin is None else self._causes.get(id(origin))
        return [] if cause is None else [cause]

    def clear(self) -> None:
        self._shadows.clear()
        self._causes.clear()
        self._followed = 0
        self.ruined.clear()


def _apart(out: torch.Tensor, twin: torch.Tensor) -> float:
    """The share of elements that are not what FP32 gives."""
    twin = twin.float()
    size = twin.abs()
    far = ((out.float() - twin).abs() > _APART * size) & (size > _SMALL * size.amax())
    return float(far.float().mean())
