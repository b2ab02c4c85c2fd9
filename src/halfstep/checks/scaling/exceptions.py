"""Exceptions of torch's own loss scaler, explained: which fault of the script's made a verb of it raise.

``TABLE`` leads from the verb and the words of the exception to the explanation, which looks at what happened before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from halfstep.checks.quoting import quoted
from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling.carried import carried
from halfstep.checks.story import OptimizerStory, Story
from halfstep.events import (
    Attempt,
    Contribution,
    Event,
    Finding,
    GradientsCleared,
    HalfUpdate,
    ModuleCalled,
    OptimizerMade,
    ParametersChanged,
    Place,
    Refused,
    Unscaled,
)

_CLOSURES = ("LBFGS",)


class RefusedByScaler(BaseCheck):
    """A verb of the scaler raised."""

    rules = (
        "scaler-update-missing",
        "scaler-update-without-step",
        "scaler-sees-no-gradients",
        "closure-optimizer-with-scaler",
        "two-step-optimizer-with-scaler",
    )

    def __init__(self) -> None:
        self._made: dict[int, OptimizerMade] = {}
        self._cleared: dict[int, GradientsCleared] = {}  # the last clearing that found a gradient
        self._clearings: dict[tuple[int, Place | None], int] = {}
        self._stepped: dict[int, Attempt] = {}
        self._reached: set[int] = set()  # optimizers that some backward reached
        self._called: set[int] = set()  # optimizers that own parameters of a model whose forward ran for training

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case OptimizerMade():
                self._made[event.optimizer] = event
            case Contribution():
                self._reached.update(event.optimizers)
            case ModuleCalled() if event.grad_enabled and event.training:
                self._called.update(event.optimizers)
            case GradientsCleared():
                for ident in event.optimizers:
                    if story.optimizer(ident).live:
                        self._cleared[ident] = event
                    key = (ident, event.at)
                    self._clearings[key] = self._clearings.get(key, 0) + 1
            case Attempt():
                self._stepped[event.optimizer] = event
            case Refused():
                for verb, words, explain in TABLE:
                    if event.verb == verb and words in event.message:
                        found = explain(self, event, story)
                        if found is not None:
                            yield found
                        return
            case _:
                pass

    def finding(self, rule: str, event: Refused, message: str, fix: str, at: Place | None = None) -> Finding:
        return Finding(
            rule=rule,
            severity="error",
            at=at or event.at,
            message=f"{message} (torch: {quoted(event)})",
            evidence={"exception": event.type, "words": event.message[:200], "verb": event.verb},
            fix=fix,
        )

    # -- one method an exception -------------------------------------------------------------------------------------

    def stepped_twice(self, event: Refused, story: Story) -> Finding | None:
        """`step()` or `unscale_()` although the scaler has stepped this optimizer since its last `update()`."""
        last = story.scaler(event.scaler).stepped.get(event.optimizer or 0)
        at = event.at if event.verb == "step" or last is None else last.at
        if last is not None and not _contributed_since(story.optimizer(event.optimizer or 0)):
            message = "scaler.step(optimizer) was called twice on the same gradients"
            return self.finding("scaler-update-missing", event, message, "call scaler.step(optimizer) once a group")
        return self.finding(
            "scaler-update-missing",
            event,
            "no scaler.update() followed scaler.step(optimizer): the scaler cannot tell this attempt from the last",
            "scaler.update()  # once, after the last scaler.step(...) of the iteration",
            at,
        )

    def unscaled_twice(self, event: Refused, story: Story) -> Finding | None:
        ident = event.optimizer or 0
        optimizer = story.optimizer(ident)
        early = story.scaler(event.scaler).unscaled.get(ident)
        if self._by_closure(event):
            return self.closure(event, story)
        if early is not None and self._is_two_step(optimizer, early):
            return self.finding(
                "two-step-optimizer-with-scaler",
                event,
                "a two-step update unscales twice, once for each half, and no scaler.update() came between",
                "call scaler.update() after the first half, before the second backward",
            )
        since = [c for c in optimizer.pending if early is not None and c.seq > early.seq]
        erased = {c.number for c in optimizer.erased}
        if not since:
            message = "unscale_ was called twice on the same gradients; the second call would divide them again"
            return self.finding(
                "unscale-mid-group", event, message, "call scaler.unscale_(optimizer) once a group, in one place"
            )
        kept = [c for c in optimizer.pending if early is not None and c.seq < early.seq and c.number not in erased]
        if kept and carried(optimizer).late:
            return None  # unscale-mid-group, told when the late contribution came
        return self._skipped_by_hand(event, early)

    def _skipped_by_hand(self, event: Refused, early: Unscaled | None) -> Finding:
        ident = event.optimizer or 0
        cleared, stepped = self._cleared.get(ident), self._stepped.get(ident)
        at = event.at
        if cleared is not None and self._clearings.get((ident, cleared.at), 0) <= 2 and len(self._clearings) > 1:
            at = cleared.at  # a branch of its own discards them
        elif stepped is not None:
            at = stepped.at  # update() stands where only a step leads
        found = " (unscale_ had found inf or NaN)" if early is not None and early.found_inf else ""
        return self.finding(
            "scaler-update-missing",
            event,
            f"gradients were unscaled{found} and then discarded without scaler.update(): a skip by hand must tell it",
            "call scaler.update() every time unscale_ was called, skipped or not; scaler.step() skips by itself",
            at,
        )

    def _is_two_step(self, optimizer: OptimizerStory, early: Unscaled) -> bool:
        return any(isinstance(e, HalfUpdate) for e in optimizer.between) or any(
            isinstance(e, ParametersChanged) and e.seq > early.seq for e in optimizer.between
        )

    def no_gradients(self, event: Refused, story: Story) -> Finding | None:
        ident = event.optimizer or 0
        optimizer, made = story.optimizer(ident), self._made.get(ident)
        if self._by_closure(event):
            return self.closure(event, story)
        if optimizer.pending and not optimizer.live:
            cleared = self._cleared.get(ident)
            return self.finding(
                "zero-grad-mid-group",
                event,
                f"{len(optimizer.pending)} contributions were cleared between backward and scaler.step(optimizer)",
                "clear gradients after the step, or before the group's first backward",
                cleared.at if cleared is not None else None,
            )
        never = ident not in self._reached
        detached = never and ident in self._called
        owns = f"its {made.parameters} parameter tensors" if made is not None else "its parameters"
        return self.finding(
            "scaler-sees-no-gradients",
            event,
            f"no backward reached {owns}, though a forward used them: what it gave was detached, or not in the loss"
            if detached
            else f"no backward reached {owns}: the optimizer holds stale or replaced parameters"
            if never
            else f"no gradient reached {owns} since its last update",
            "leave out detach(), .data and no_grad() between the model and the loss"
            if detached
            else "build the optimizer from the parameters of the model that is trained, after the model is complete",
            made.at if never and made is not None and not detached else None,
        )

    def nothing_to_update(self, event: Refused, story: Story) -> Finding | None:
        scaler = story.scaler(event.scaler)
        empty = next((a for a in scaler.stepped.values() if a.gradients == 0), None)
        if empty is not None:
            made = self._made.get(empty.optimizer)
            return self.finding(
                "scaler-sees-no-gradients",
                event,
                "scaler.step(optimizer) found no gradient in any parameter of the optimizer",
                "build the optimizer from the parameters of the model that is trained, after the model is complete",
                made.at if made is not None and empty.optimizer not in self._reached else empty.at,
            )
        waiting = [c for o in story.optimizers.values() for c in o.live if c.scaler == event.scaler]
        grouped = any(d.by >= 2 for c in waiting for d in c.divisions) or any(
            size > 1 for o in story.optimizers.values() for size in o.sizes
        )
        if waiting and (grouped or len(waiting) > 1):
            return self.finding(
                "scaler-update-mid-group",
                event,
                f"scaler.update() ran while {len(waiting)} contributions of a group were pending, with nothing stepped",
                "call scaler.update() once a group, after scaler.step(optimizer)",
            )
        return self.finding(
            "scaler-update-without-step",
            event,
            "scaler.update() ran although nothing was unscaled or stepped since the last one",
            "call scaler.update() once, after scaler.step(optimizer)",
        )

    def never_scaled(self, event: Refused, story: Story) -> Finding | None:
        """`step` or `update` of a scaler that never scaled a loss."""
        waiting = [c for o in story.optimizers.values() for c in o.live]
        if not waiting or event.verb == "update":
            return self.finding(
                "scaler-update-without-step",
                event,
                f"scaler.{event.verb}() ran before anything was scaled",
                "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
            )
        half = waiting[-1].autocast == "float16"
        return self.finding(
            "fp16-without-scaler" if half else "scaler-without-fp16",
            event,
            "the loss went backward without scaler.scale(loss): nothing carries the scale that step() would divide by",
            "scaler.scale(loss).backward()",
            waiting[-1].at,
        )

    def half_gradients(self, event: Refused, story: Story) -> Finding | None:
        return None  # half-parameters-with-scaler, which knows where they became half

    def closure(self, event: Refused, story: Story) -> Finding | None:
        return self.finding(
            "closure-optimizer-with-scaler",
            event,
            "an optimizer that runs a closure evaluates the loss several times in one step: the scaler can unscale and "
            "check it only once",
            "use bfloat16 or float32 with this optimizer: no loss scale is needed there",
        )

    def _by_closure(self, event: Refused) -> bool:
        made = self._made.get(event.optimizer or 0)
        return event.closure or (made is not None and made.type in _CLOSURES)


def _contributed_since(optimizer: OptimizerStory) -> bool:
    return bool(optimizer.pending)


_Explain = Callable[[RefusedByScaler, Refused, Story], Finding | None]

TABLE: tuple[tuple[str, str, _Explain], ...] = (
    ("step", "step() has already been called", RefusedByScaler.stepped_twice),
    ("unscale_", "after step()", RefusedByScaler.stepped_twice),
    ("unscale_", "has already been called", RefusedByScaler.unscaled_twice),
    ("step", "No inf checks were recorded for this optimizer", RefusedByScaler.no_gradients),
    ("update", "No inf checks were recorded prior to update", RefusedByScaler.nothing_to_update),
    ("step", "_scale is None", RefusedByScaler.never_scaled),
    ("unscale_", "_scale is None", RefusedByScaler.never_scaled),
    ("update", "_scale is None", RefusedByScaler.never_scaled),
    ("step", "Attempting to unscale FP16 gradients", RefusedByScaler.half_gradients),
    ("unscale_", "Attempting to unscale FP16 gradients", RefusedByScaler.half_gradients),
    ("step", "not implemented for 'BFloat16'", RefusedByScaler.half_gradients),
    ("unscale_", "not implemented for 'BFloat16'", RefusedByScaler.half_gradients),
    ("step", "Closure use is not currently supported", RefusedByScaler.closure),
    ("step", "'closure'", RefusedByScaler.closure),
)
