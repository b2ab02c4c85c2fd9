"""Precision and loss scale: scaling where nothing is FP16, half parameters under a scaler, FP16 without one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling.carried import ScaleReads, carried
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Attempt,
    Contribution,
    Event,
    Finding,
    GradientsEdited,
    HalfParameters,
    Place,
    Raised,
    Refused,
    ScaleUpdated,
    Unscaled,
)

_JUDGED = 32  # updates of the scale after which a run's precision is known
_LOST = 0.1  # of a gradient's elements
_EARLY = 8  # contributions at the start of a run: later, gradients may shrink for good reasons


@dataclass(slots=True)
class _Use:
    """What a scaler's contributions were computed in."""

    contributions: int = 0
    fp16: bool = False
    seen: bool = False
    autocast: str | None = None
    at: Place | None = None
    updates: int = 0
    told: bool = False


class ScalerWithoutFp16(BaseCheck):
    """Loss scaling while nothing is computed in FP16: nothing underflows there, the scaler can only skip."""

    rules = ("scaler-without-fp16",)

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        self._raised = False

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case Contribution(scaler=int(scaler)) if event.scale is not None:
                use = self._uses.setdefault(scaler, _Use())
                use.contributions += 1
                use.at = use.at or event.at
                use.autocast = use.autocast or event.autocast
                use.seen = use.seen or event.halves is not None
                use.fp16 = use.fp16 or event.autocast == "float16" or "float16" in (event.halves or ())
            case HalfParameters() if "float16" in event.dtypes:
                for use in self._uses.values():
                    use.fp16 = True
            case ScaleUpdated():
                used = self._uses.get(event.scaler)
                if used is not None:
                    used.updates += 1
                    if used.updates == _JUDGED:
                        yield from self._judge(event.scaler, used, story)
            case Raised():
                self._raised = True
            case _:
                pass

    def end(self, story: Story) -> Iterable[Finding]:
        for scaler, use in self._uses.items():
            if not self._raised or use.updates > 1:
                yield from self._judge(scaler, use, story)

    @staticmethod
    def _judge(scaler: int, use: _Use, story: Story) -> Iterable[Finding]:
        known = use.seen or use.autocast == "bfloat16"
        if use.fp16 or use.told or not known or not use.updates:
            return
        use.told = True
        made = story.scaler(scaler).made
        what = "bfloat16" if use.autocast == "bfloat16" else "float32"
        largest = max((scale for _, scale in story.scaler(scaler).path), default=0.0)
        yield Finding(
            rule="scaler-without-fp16",
            severity="warning",
            at=made.at if made is not None else use.at,
            message=(
                f"losses are multiplied by a scale (up to {largest:g}) although they are computed in {what}, where "
                "nothing underflows that float32 would keep: the scaler can only skip updates"
            ),
            evidence={"precision": what, "contributions": use.contributions},
            fix="GradScaler(..., enabled=dtype == torch.float16)  # or torch.autocast(..., dtype=torch.float16)",
        )


class HalfParametersWithScaler(BaseCheck):
    """The parameters a scaler steps are themselves half: it needs FP32 gradients to unscale."""

    rules = ("half-parameters-with-scaler",)

    def __init__(self) -> None:
        self._half: dict[int, HalfParameters] = {}

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case HalfParameters():
                self._half[event.optimizer] = event
            case Unscaled() | Refused() if event.optimizer in self._half:
                yield self._finding(self._half.pop(event.optimizer), event)
            case Attempt(scaler=int()) if event.optimizer in self._half:
                yield self._finding(self._half.pop(event.optimizer), event)
            case _:
                pass

    @staticmethod
    def _finding(half: HalfParameters, event: Unscaled | Refused | Attempt) -> Finding:
        count = sum(half.dtypes.values())
        name = f" (the first is {half.name})" if half.name else ""
        refused = f"; torch: {event.type}: {event.message[:120]}" if isinstance(event, Refused) else ""
        return Finding(
            rule="half-parameters-with-scaler",
            severity="error",
            at=half.at or half.used_at,
            message=(
                f"{count} parameter tensors are {' and '.join(sorted(half.dtypes))} themselves{name}: their gradients "
                f"are half too, and a scaler cannot unscale them safely{refused}"
            ),
            evidence={"dtypes": dict(half.dtypes), "name": half.name},
            fix="keep parameters in float32 and let torch.autocast cast what is computed",
            module=half.name.rpartition(".")[0] or None if half.name else None,
        )


class Fp16WithoutScaler(BaseCheck):
    """FP16 contributions without a loss scale whose gradients underflow; or unscaled ones that a scaler divides."""

    rules = ("fp16-without-scaler",)

    def __init__(self) -> None:
        self._reads = ScaleReads()
        self._number = 0
        self._plain: Contribution | None = None
        self._own_scale = False  # something else than a scaler multiplies losses and divides gradients
        self._lost: list[Contribution] = []

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        self._reads.see(event)
        if isinstance(event, Contribution) and event.scale is None and event.autocast == "float16":
            self._number += 1
            self._plain = self._plain or event
            if self._number <= _EARLY and event.lost is not None and event.lost >= _LOST:
                self._lost.append(event)
        match event:
            case GradientsEdited(factor=float()) | Attempt(divided_by=float()):
                self._own_scale = True
            case _:
                pass
        return ()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt = update.attempt
        if attempt.divided_by is not None and attempt.via != "scaler":
            return  # a tool that scales by itself
        live = update.live
        if attempt.via == "scaler" and not self._reads.ever:
            yield from self._divided(update)
        elif attempt.via == "optimizer" and not carried(update).unknown:
            lost = [c for c in live if any(c is known for known in self._lost)]
            for c in lost:
                yield self._underflow(c, update)

    @staticmethod
    def _divided(update: Update) -> Iterable[Finding]:
        plain = [c for c in update.live if c.scale is None and c.autocast == "float16"]
        divided = [e for e in update.between if isinstance(e, Unscaled) and e.scale not in (None, 1.0)]
        if not plain or not divided or carried(update).unknown:
            return
        scale = divided[-1].scale or 1.0
        yield Finding(
            rule="fp16-without-scaler",
            severity="error",
            at=plain[-1].at,
            update=update.number,
            message=(
                f"this backward ran without scaler.scale(loss), yet its gradients were divided by the loss scale "
                f"{scale:g}: they count {scale:g} times too little"
            ),
            evidence={"scale": scale, "contributions": len(plain)},
            fix="scaler.scale(loss).backward()",
        )

    @staticmethod
    def _underflow(event: Contribution, update: Update) -> Finding:
        lost = event.lost or math.nan
        return Finding(
            rule="fp16-without-scaler",
            severity="error",
            at=event.at,
            update=update.number,
            message=(
                f"FP16 without a loss scale: {lost:.0%} of a gradient's elements that FP32 keeps became zero"
                f" ({event.lost_by})"
            ),
            evidence={"lost": event.lost, "operator": event.lost_by},
            fix="scaler = torch.amp.GradScaler(); scaler.scale(loss).backward()  # or dtype=torch.bfloat16",
        )

    def end(self, story: Story) -> Iterable[Finding]:
        if (
            self._plain is None
            or self._lost
            or self._own_scale
            or any(s.made and s.made.enabled for s in story.scalers.values())
        ):
            return
        applied = any(o.applied and i in self._plain.optimizers for i, o in story.optimizers.items())
        if applied:
            yield Finding(
                rule="fp16-without-scaler",
                severity="info",
                at=self._plain.at,
                count=self._number,
                message="FP16 without a loss scale; no gradient was seen to underflow in the micro-batches looked at",
                evidence={"contributions": self._number},
                fix="torch.amp.GradScaler, or dtype=torch.bfloat16",
            )
