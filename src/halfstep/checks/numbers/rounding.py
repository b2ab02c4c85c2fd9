"""What rounding takes: gradients, positions, totals, the epsilon of an optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Event,
    Finding,
    GradientsMeasured,
    HalfParameters,
    LayerGradient,
    NonFinite,
    OptimizerMade,
    Place,
    PositionsCollided,
    ScalerMade,
    TotalStalled,
)

_TINIEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}  # the smallest number above zero
_LOST = 0.3  # share of a layer's gradient elements
_MISSING = 0.1  # of its norm
_FEW = 16
_SEEN = 2  # measured contributions
_REACH = 2.0**20  # what a scale so many times larger would not keep is as good as zero in FP32 too
_ALL = 1.1  # more than all of a norm: cancelled values, of which FP32 keeps nothing either
_NAMED = 4


class Positions(BaseCheck):
    rules = ("positions-in-low-precision",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if not isinstance(event, PositionsCollided):
            return
        pair = f" ({event.first[0]:g} and {event.first[1]:g} are the first to become one)" if event.first else ""
        exact = {"float16": 2048, "bfloat16": 256}.get(event.dtype, 0)
        yield Finding(
            rule="positions-in-low-precision",
            severity="error",
            at=event.at,
            message=(
                f"integers up to {event.largest:g} in {event.dtype}: {event.count} different positions became "
                f"{event.distinct}{pair}; it holds every integer up to {exact} only"
            ),
            evidence={
                "dtype": event.dtype,
                "positions": event.count,
                "distinct": event.distinct,
                "largest": event.largest,
                "first_pair": event.first,
                "exact_up_to": exact,
            },
            fix="keep positions in int64 or float32, cast what is computed of them (sines, embeddings), not them",
            module=event.module,
            operator=event.operator.strip("_"),
            phase="forward",
        )


class Totals(BaseCheck):
    rules = ("low-precision-accumulator",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if not isinstance(event, TotalStalled):
            return
        yield Finding(
            rule="low-precision-accumulator",
            severity="error",
            at=event.at,
            message=(
                f"a running total in {event.dtype} stands still at {event.total:g}: {event.times} of the "
                f"{event.additions} additions seen changed nothing, {event.added:.3g} was lost so far"
            ),
            evidence={
                "dtype": event.dtype,
                "total": event.total,
                "lost": event.added,
                "stalled": event.times,
                "additions": event.additions,
            },
            fix="keep the total in float32 or in a Python float: total += value.float()",
            operator="add",
        )


@dataclass(slots=True)
class _Layer:
    lost: int = 0  # measured contributions in which it lost much
    last: LayerGradient | None = None


@dataclass(slots=True)
class _Backward:
    """The measured contributions of one line."""

    event: GradientsMeasured
    measured: int = 0
    wrong: int = 0
    scaler: bool = False
    layers: dict[str, _Layer] = field(default_factory=dict)
    worst: Counter[tuple[Place | None, str | None]] = field(default_factory=Counter)


class GradientUnderflow(BaseCheck):
    """Layers that lose much of their gradient to zero in FP16, again and again."""

    rules = ("gradient-underflow",)

    def __init__(self) -> None:
        self._backwards: dict[Place | None, _Backward] = {}
        self._scaler: ScalerMade | None = None

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, ScalerMade) and event.enabled:
            self._scaler = event
        elif isinstance(event, GradientsMeasured):
            known = self._backwards.setdefault(event.at, _Backward(event))
            known.measured += 1
            known.scaler = known.scaler or event.scale is not None
            bad = [layer for layer in event.layers if _is_lost(layer)] if (event.needed or 1.0) <= _REACH else []
            if bad:
                known.event = event
                known.wrong += 1
                known.worst[(event.worst_at, event.worst_module)] += 1
            for layer in bad:
                entry = known.layers.setdefault(layer.name, _Layer())
                entry.lost += 1
                entry.last = layer
        return ()

    def end(self, story: Story) -> Iterable[Finding]:
        for known in self._backwards.values():
            if known.wrong < min(_SEEN, known.measured) or 2 * known.wrong < known.measured:
                continue
            layers = [(n, e) for n, e in known.layers.items() if 2 * e.lost >= known.wrong and e.last is not None]
            if layers:
                yield self._finding(known, [(n, e.last) for n, e in layers if e.last is not None])

    def _finding(self, known: _Backward, layers: list[tuple[str, LayerGradient]]) -> Finding:
        event = known.event
        scale = event.scale or 1.0
        layers.sort(key=lambda pair: -(pair[1].missing or 0.0))
        name, worst = layers[0]
        shares = {n: round(layer.lost / max(layer.kept, 1), 4) for n, layer in layers[:_NAMED]}
        others = f" and {len(layers) - 1} other layers" if len(layers) > 1 else ""
        fits = event.fitting is not None and (event.needed or 1.0) * scale <= event.fitting
        at, module, fix = (
            event.at,
            name,
            f"a loss scale of {event.fitting or 0:g} fits: GradScaler(init_scale={event.fitting or 0:g})",
        )
        if not fits:
            (place, inner), _ = known.worst.most_common(1)[0]
            at, module = place or at, inner or module
            fix = "compute this part in float32: no loss scale fits both it and the rest"
        elif known.scaler and self._scaler is not None:
            at = self._scaler.at
        carried = f"loss scale {event.scale:g}" if event.scale is not None else "no loss scale"
        return Finding(
            rule="gradient-underflow",
            severity="error",
            at=at,
            count=known.wrong,
            message=(
                f"{worst.lost / max(worst.kept, 1):.0%} of the gradient elements of {name}{others} that FP32 keeps are "
                f"zero in {event.dtype} with {carried}: {worst.missing or 0:.0%} of its norm is lost"
                + (f" (most in {event.worst_by})" if event.worst_by else "")
            ),
            evidence={
                "lost": shares,
                "missing_norm": worst.missing,
                "scale": event.scale,
                "fitting_scale": event.fitting,
                "measured": known.measured,
                "underflowed": known.wrong,
                "operator": event.worst_by,
            },
            fix=fix,
            module=module,
            operator=(event.worst_by or "").split(" in ")[-1] or None,
            phase="backward",
        )


def _is_lost(layer: LayerGradient) -> bool:
    missing = layer.missing or 0.0
    return layer.kept >= _FEW and layer.lost >= _LOST * layer.kept and _MISSING <= missing <= _ALL


class OptimizerEpsilon(BaseCheck):
    """The eps of an optimizer over FP16 parameters: 1e-8 is 0 there."""

    rules = ("epsilon-underflow",)

    def __init__(self) -> None:
        self._made: dict[int, OptimizerMade] = {}
        self._halves: dict[int, str] = {}
        self._told: set[int] = set()
        self._broken = False

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case OptimizerMade():
                self._made[event.optimizer] = event
                self._note(event.optimizer, event.dtypes)
            case HalfParameters():
                self._note(event.optimizer, event.dtypes)
            case NonFinite(cause="epsilon", in_optimizer=True):
                self._broken = True
            case _:
                pass
        return ()

    def _note(self, ident: int, dtypes: Iterable[str]) -> None:
        for dtype in dtypes:
            if dtype in _TINIEST:
                self._halves[ident] = dtype

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        ident, attempt = update.optimizer, update.attempt
        made, dtype = self._made.get(ident), self._halves.get(ident)
        if made is None or dtype is None or ident in self._told or attempt.nonfinite:
            return
        epsilon = made.options.get("eps")
        if not isinstance(epsilon, float) or not 0.0 < epsilon <= _TINIEST[dtype] / 2:
            return
        if attempt.weights is None or math.isfinite(attempt.weights):
            return
        self._told.add(ident)
        yield Finding(
            rule="epsilon-underflow",
            severity="error",
            at=made.at,
            update=update.number,
            message=(
                f"{made.type}'s eps {epsilon:g} is 0 in {dtype}, the dtype of its parameters and their state: update "
                f"{update.number} divided by zero and wrote non-finite weights, though every gradient was finite"
            ),
            evidence={"eps": epsilon, "dtype": dtype, "smallest": _TINIEST[dtype], "gradient_norm": attempt.norm},
            fix="keep the parameters in float32 and compute under autocast, or eps=1e-4",
        )
