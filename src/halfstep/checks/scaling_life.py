"""A scaler's life: made again in the middle of a run, not restored, used where nothing is FP16, missing where it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.checks.carried import ScaleReads, carried
from halfstep.checks.registry import BaseCheck
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
    ScalerMade,
    ScaleUpdated,
    StateLoaded,
    StateSaved,
    Unscaled,
)

_SETTLED = 2  # attempts by a new scaler that make sure it took the old one's place
_JUDGED = 32  # updates of the scale after which a run's precision is known
_LOST = 0.1  # of a gradient's elements
_KEPT = 64  # scalers remembered
_EARLY = 8  # contributions at the start of a run: later, gradients may shrink for good reasons


@dataclass(slots=True)
class _Life:
    made: ScalerMade | None = None
    scale: float | None = None
    attempts: dict[int, int] = field(default_factory=dict)  # optimizer -> attempts through this scaler
    loaded: bool = False
    given: bool = False
    last: int = 0  # number of the last event that used it
    skipped: int = 0


class ScalerReplaced(BaseCheck):
    """A new scaler in the place of one that had found its scale; a resumed run whose scaler starts afresh."""

    rules = ("scaler-recreated", "scaler-not-restored")

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}
        self._loaded: dict[int, StateLoaded] = {}  # optimizer -> state loaded into it, not yet stepped since
        self._modules = 0
        self._files: set[str] = set()
        self._numbers: set[float] = set()
        self._told: set[int] = set()
        self._saved = False

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case ScalerMade(enabled=True):
                self._lives[event.scaler] = _Life(made=event, scale=event.scale, last=event.seq)
                if len(self._lives) > _KEPT:
                    del self._lives[next(iter(self._lives))]
            case StateLoaded(kind="scaler", ident=int(ident)):
                self._life(ident).loaded = True
            case StateLoaded(kind="optimizer", ident=int(ident)):
                if event.states or "file with optimizer" in self._files:  # else the state of one that never ran
                    self._loaded[ident] = event
            case StateLoaded(kind="module"):
                self._modules += 1
            case StateSaved():
                self._saved = True
            case StateLoaded():
                self._files.add(event.kind)
                self._numbers.update(event.numbers)
            case ScaleUpdated():
                life = self._life(event.scaler)
                life.scale, life.given = event.after, life.given or event.given
            case _:
                pass
        return ()

    def _others(self, life: _Life) -> Iterable[_Life]:
        return (other for other in self._lives.values() if other is not life)

    def _life(self, ident: int) -> _Life:
        return self._lives.setdefault(ident, _Life())

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt = update.attempt
        if attempt.scaler is None:
            self._loaded.pop(update.optimizer, None)
            return
        life = self._life(attempt.scaler)
        before = life.attempts.get(update.optimizer, 0)
        life.attempts[update.optimizer] = before + 1
        life.last = attempt.seq
        life.skipped += attempt.outcome == "skipped"
        loaded = self._loaded.pop(update.optimizer, None)
        if loaded is not None and not before:
            yield from self._not_restored(loaded, life, attempt)
        if life.attempts[update.optimizer] == _SETTLED:
            yield from self._recreated(attempt.scaler, update.optimizer, life)

    def end(self, story: Story) -> Iterable[Finding]:
        for ident, life in self._lives.items():
            for optimizer, count in life.attempts.items():
                if count < _SETTLED:
                    yield from self._recreated(ident, optimizer, life)

    def _recreated(self, ident: int, optimizer: int, life: _Life) -> Iterable[Finding]:
        made = life.made
        if made is None or life.loaded or life.given or ident in self._told:
            return
        older = [
            old
            for number, old in self._lives.items()
            if number != ident and old.attempts.get(optimizer) and old.made is not None and old.last < made.seq
        ]
        if not older:
            return
        old = max(older, key=lambda o: o.last)
        assert old.made is not None
        carried_over = old.scale == made.scale and made.scale != old.made.scale
        if carried_over or (old.scale is not None and made.scale in self._numbers):
            return
        self._told.add(ident)
        lost = old.scale is not None and old.scale != made.scale
        yield Finding(
            rule="scaler-recreated",
            severity="error" if lost else "warning",
            at=made.at,
            message=(
                f"a new scaler (scale {made.scale:g}) replaced the one this optimizer was stepped with, which had "
                f"reached {old.scale or 0:g} after {sum(old.attempts.values())} attempts"
                + ("" if lost else ": its count of good updates, after which the scale grows, starts at zero again")
            ),
            evidence={
                "scale_before": old.scale,
                "scale_after": made.scale,
                "attempts_before": sum(old.attempts.values()),
                "skipped_before": old.skipped,
            },
            fix="make the GradScaler once, before the loop",
        )

    def _not_restored(self, loaded: StateLoaded, life: _Life, attempt: Attempt) -> Iterable[Finding]:
        made = life.made
        if made is None or life.loaded or life.given or sum(life.attempts.values()) > 1 or not self._modules:
            return
        if made.scale in self._numbers:
            return  # restored by hand
        there = "file with scaler" in self._files
        if (
            not there
            and self._saved
            and not any(other.last < loaded.seq and other.attempts for other in self._others(life))
        ):
            return  # what was saved here was not trained with a scaler: the run changes its precision
        yield Finding(
            rule="scaler-not-restored",
            severity="error",
            at=loaded.at,
            message=(
                f"model and optimizer were restored, the loss scale was not: this scaler starts at {made.scale:g}"
                + ("; the checkpoint holds the scaler's state" if there else "")
            ),
            evidence={"scale": made.scale, "states": loaded.states, "in_checkpoint": there},
            fix='scaler.load_state_dict(checkpoint["scaler"])  # and save scaler.state_dict() with the rest',
        )


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
