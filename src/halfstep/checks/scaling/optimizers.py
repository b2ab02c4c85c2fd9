"""Optimizers that a scaler does not fit: driven by closures, of two steps, fused with momentum."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling.carried import carried
from halfstep.checks.scaling.order import is_two_step
from halfstep.checks.story import Story, Update
from halfstep.events import Attempt, Event, Finding, HalfUpdate, OptimizerMade, Place, StateLoaded, Unscaled


class ClosureWithScaler(BaseCheck):
    """A closure's backward left the scale on the gradients that the optimizer used."""

    rules = ("closure-optimizer-with-scaler",)

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt, now = update.attempt, carried(update)
        if not attempt.closure or attempt.divided_by is not None or not now.scaled:
            return
        yield Finding(
            rule="closure-optimizer-with-scaler",
            severity="error",
            at=attempt.at,
            update=update.number,
            message=(
                f"the optimizer ran its closure on a loss multiplied by {now.scale:g}: the gradients it used are that "
                "many times too large, and nothing checks them for inf"
            ),
            evidence={"scale": now.scale, "evaluations": len(update.contributions), "via": attempt.via},
            fix="use bfloat16 or float32 with this optimizer: no loss scale is needed there",
        )


class TwoStepWithScaler(BaseCheck):
    """Ascend and descend on gradients that carry the scale, or through an unscale_ of the first half."""

    rules = ("two-step-optimizer-with-scaler",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, HalfUpdate):
            now = carried(story.optimizer(event.optimizer))
            if now.scaled and now.scale is not None:
                yield self._finding(event.method, event.at, now.scale, stale=now.unscaled is not None)

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt, now = update.attempt, carried(update)
        if attempt.closure or attempt.divided_by is not None or not is_two_step(update):
            return  # an optimizer that runs a closure moves parameters between evaluations, too
        if not now.scaled or now.scale is None:
            return
        halves = [e for e in update.between if isinstance(e, HalfUpdate)]
        if halves and any(carried(update, e.seq).scaled for e in halves):
            return  # told where the half update was
        stale = any(isinstance(e, Unscaled) for e in update.between)
        yield self._finding("step", update.attempt.at, now.scale, stale)

    @staticmethod
    def _finding(method: str, at: Place | None, scale: float, stale: bool) -> Finding:
        why = "the unscale_ before it was of the first half's gradients" if stale else "nobody unscaled them"
        return Finding(
            rule="two-step-optimizer-with-scaler",
            severity="error",
            at=at,
            message=f"{method} of a two-step update used gradients multiplied by the loss scale {scale:g}: {why}",
            evidence={"scale": scale, "method": method, "stale_unscale": stale},
            fix="for each half: scaler.scale(loss).backward(); scaler.unscale_(optimizer); ...; scaler.update()",
        )


class FusedMomentumAfterSkip(BaseCheck):
    """Fused SGD whose first attempt the scaler skipped: the momentum buffers it made were never written."""

    rules = ("fused-momentum-after-skip",)

    def __init__(self) -> None:
        self._fused: dict[int, OptimizerMade] = {}
        self._skipped: dict[int, Attempt] = {}

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case OptimizerMade(type="SGD") if event.options.get("fused") and event.options.get("momentum"):
                self._fused[event.optimizer] = event
            case StateLoaded(kind="optimizer", ident=int(ident)):
                self._fused.pop(ident, None)
            case _:
                pass
        return ()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt, ident = update.attempt, update.optimizer
        made = self._fused.get(ident)
        if made is None or attempt.via != "scaler":
            return
        if attempt.outcome == "skipped":
            if not attempt.states:
                self._skipped[ident] = attempt
            return
        del self._fused[ident]
        skipped = self._skipped.pop(ident, None)
        if skipped is None or not attempt.states:
            return
        momentum = made.options.get("momentum")
        after = f"; the parameters' norm after it is {attempt.weights:.3g}" if attempt.weights is not None else ""
        yield Finding(
            rule="fused-momentum-after-skip",
            severity="error",
            at=made.at,
            update=update.number,
            message=(
                f"the first attempt of this fused SGD (momentum {momentum:g}) was skipped: its momentum buffers were "
                f"made and never written, and update {update.number} used what memory held{after}"
            ),
            evidence={"momentum": momentum, "first_applied": update.number, "weights": attempt.weights},
            fix="fused=False, or start from a smaller init_scale, or seed state[p]['momentum_buffer'] with zeros",
        )
