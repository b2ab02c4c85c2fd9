"""Frozen parameters: those that no gradient should move, and that move."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import Event, Finding, FrozenMoved, OptimizerMade

_FIX = {
    "requires_grad is False": (
        "optimizer.zero_grad(set_to_none=True) after freezing, or give the optimizer only what trains: "
        "[p for p in model.parameters() if p.requires_grad]"
    ),
    "gradient zeroed by hand": (
        "give the frozen parameters no gradient (p.grad = None), or a group with weight_decay=0 and no momentum"
    ),
    "no contribution": "optimizer.zero_grad(set_to_none=True): a parameter without gradient is left alone",
}


class FrozenParametersMove(BaseCheck):
    """Weight decay or momentum moved a parameter whose gradient is kept at zero on purpose."""

    rules = ("frozen-parameters-move",)

    def __init__(self) -> None:
        self._made: dict[int, OptimizerMade] = {}
        self._idle: dict[int, FrozenMoved] = {}
        self._attempts: dict[int, int] = {}

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, OptimizerMade):
            self._made[event.optimizer] = event
        elif isinstance(event, FrozenMoved) and event.parameters:
            if event.why == "no contribution":
                self._idle[event.optimizer] = event  # judged at the end: a contribution may still come
                self._attempts[event.optimizer] = story.optimizer(event.optimizer).attempts
            else:
                yield self._finding(event)

    def end(self, story: Story) -> Iterable[Finding]:
        for ident, event in self._idle.items():
            attempts = story.optimizer(ident).attempts
            since = attempts - self._attempts[ident]
            if 2 * (event.updates + since) >= attempts and since <= event.updates:
                yield self._finding(event)

    def _finding(self, event: FrozenMoved) -> Finding:
        made = self._made.get(event.optimizer)
        options = made.options if made is not None else {}
        decay, momentum = options.get("weight_decay") or 0, options.get("momentum") or options.get("betas") or 0
        means = " and ".join(w for w in ("weight decay" if decay else "", "momentum" if momentum else "") if w)
        name = f" ({event.name})" if event.name else ""
        return Finding(
            rule="frozen-parameters-move",
            severity="error",
            at=event.at,
            update=story_number(event),
            message=(
                f"{event.parameters} parameter tensors meant frozen{name} moved by up to {event.change or 0:.2g}: "
                f"{event.why}, yet {means or 'the optimizer'} acts on what gradient they keep"
            ),
            evidence={
                "parameters": event.parameters,
                "why": event.why,
                "largest_change": event.change,
                "weight_decay": decay,
                "momentum": momentum,
            },
            fix=_FIX[event.why],
        )


def story_number(event: FrozenMoved) -> int | None:
    return event.updates if event.updates > 1 else None
