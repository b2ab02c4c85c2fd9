"""Non-finite values: written into parameters, or coming again and again until nothing is left of the scale."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import Contribution, Event, Finding, NonFinite, OptimizerMade, Place, ScaleUpdated

_ROW = 10  # skips in a row, from torch's first scale, beyond what settling takes
_FIRST = 65536.0
_FALLS = 12
_RECENT = 32
_OFTEN = 3  # skips among the recent attempts
_WILD = 8  # skips at a scale far below one that updates were applied at
_FAR = 8.0
_GREW = 10.0  # times the first value
_DIVERGED = 1e3  # times the weights' first norm: no single operator is at fault
_FOLLOWED = 2.0  # times the weights' first norm, where the loss grew too


class NonfiniteUpdateApplied(BaseCheck):
    """An update wrote non-finite values into parameters, and nothing stopped it."""

    rules = ("nonfinite-update-applied",)

    def __init__(self) -> None:
        self._finite: dict[int, float] = {}  # optimizer -> the parameters' last finite norm
        self._first: dict[int, float] = {}
        self._told: set[int] = set()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt, ident = update.attempt, update.optimizer
        if attempt.weights is None or ident in self._told:
            return
        if math.isfinite(attempt.weights):
            self._finite[ident] = attempt.weights
            self._first.setdefault(ident, attempt.weights)
            return
        self._told.add(ident)
        if not update.applied or (ident not in self._finite and update.number > 1):
            return
        before = self._finite.get(ident)
        was = f" (their norm was {before:.3g})" if before is not None else ""
        grew = before / self._first[ident] if before and self._first.get(ident) else 1.0
        if grew >= _DIVERGED:
            was = f" (their norm had grown from {self._first[ident]:.3g} to {before:.3g}: too high a learning rate)"
        cause = {
            True: "its gradients were not finite",
            False: "its gradients were finite, the optimizer's own arithmetic was not",
            None: "its gradients were not measured",
        }[attempt.nonfinite]
        yield Finding(
            rule="nonfinite-update-applied",
            severity="error",
            at=attempt.at,
            update=update.number,
            message=f"update {update.number} wrote non-finite values into parameters{was}: {cause}",
            evidence={"gradient_norm": attempt.norm, "weights_before": before, "lr": attempt.lr, "via": attempt.via}
            | ({"grew": grew} if grew >= _DIVERGED else {}),
            fix="if torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)): optimizer.step()",
        )


@dataclass(slots=True)
class _Run:
    """What became of one scaler."""

    first: float = _FIRST
    scale: float | None = None
    row: int = 0
    longest: int = 0
    falls: int = 0
    wild: int = 0
    best: float = 0.0  # the largest scale that an update was applied at
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    at: Place | None = None
    optimizer: int = 0
    made_by: Counter[tuple[Place | None, str, str, str]] = field(default_factory=Counter)
    example: dict[tuple[Place | None, str, str, str], NonFinite] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # without the scale: the first, the largest
    weights: list[float] = field(default_factory=list)  # the parameters' norm: the first, the last
    told: bool = False


class LossScaleCollapse(BaseCheck):
    """The scale keeps halving: what is not finite does not come from the scale.

    Settling is none of this: skips from the first scale down to a fitting one, or one each time the scale grows.
    """

    rules = ("loss-scale-collapse",)

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self._made: dict[int, OptimizerMade] = {}
        self._nonfinite: list[NonFinite] = []

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case OptimizerMade():
                self._made[event.optimizer] = event
            case NonFinite():
                self._nonfinite.append(event)
                del self._nonfinite[:-8]
            case Contribution(scaler=int(scaler)) if event.scale:
                self._loss(self._run(scaler, story), event)
            case ScaleUpdated():
                run = self._run(event.scaler, story)
                if not event.given and event.before is not None and event.after is not None:
                    run.falls += event.after < event.before
                run.scale = event.after
                if not run.told and self._is_certain(run):
                    run.told = True
                    yield self._finding(event.scaler, run)
            case _:
                pass

    def _run(self, scaler: int, story: Story) -> _Run:
        run = self._runs.get(scaler)
        if run is None:
            made = story.scaler(scaler).made
            first = made.scale if made is not None else _FIRST
            run = self._runs[scaler] = _Run(first=first, scale=first)
        return run

    @staticmethod
    def _loss(run: _Run, event: Contribution) -> None:
        if event.loss is None or not event.scale or not math.isfinite(event.loss):
            return
        loss = abs(event.loss / event.scale)
        run.losses[1:] = [max([loss, *run.losses[1:]])]

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt = update.attempt
        if attempt.scaler is None:
            return ()
        run = self._run(attempt.scaler, story)
        skipped = attempt.outcome == "skipped"
        run.recent.append(skipped)
        if skipped:
            run.row += 1
            run.longest = max(run.longest, run.row)
            run.at, run.optimizer = attempt.at, update.optimizer
            run.wild += run.scale is not None and run.scale * _FAR <= run.best
            for made in self._nonfinite:
                key = (made.at, made.operator, made.phase, made.node or "")
                run.made_by[key] += 1
                run.example.setdefault(key, made)
        else:
            run.row = 0
            run.best = max(run.best, run.scale or 0.0)
            if attempt.weights is not None and math.isfinite(attempt.weights):
                run.weights[1:] = [attempt.weights]
        self._nonfinite.clear()
        return ()

    @staticmethod
    def _settling(run: _Run) -> int:
        """Skips that settling may take."""
        return _ROW + max(0, round(math.log2(max(run.first, 1.0) / _FIRST)))

    def _is_certain(self, run: _Run) -> bool:
        scale = run.scale if run.scale is not None else 1.0
        return scale < 0.1 and run.row >= 2 and (run.row >= self._settling(run) + 4 or self._again(run))

    def _again(self, run: _Run) -> bool:
        return (
            run.falls >= _FALLS + self._settling(run) - _ROW
            and sum(run.recent) >= _OFTEN
            and ((run.scale or 1.0) < 1.0 or run.wild >= _WILD)
        )

    def end(self, story: Story) -> Iterable[Finding]:
        for scaler, run in self._runs.items():
            if not run.told and (run.row >= self._settling(run) or self._again(run)):
                run.told = True
                yield self._finding(scaler, run)

    def _finding(self, scaler: int, run: _Run) -> Finding:
        grew = self._growth(run)
        key = run.made_by.most_common(1)[0][0] if run.made_by else None
        origin = run.example[key] if key is not None else None
        made = self._made.get(run.optimizer)
        lr = made.options.get("lr") if made is not None else None
        at = run.at
        message = (
            f"the loss scale fell {run.falls} times, from {run.first:g} to {run.scale or 0:.3g}, and did not recover"
        )
        fix = "find the operator that makes the value (halfstep names it when it can look) and compute it in float32"
        if grew:
            message += f": {grew} before it; the learning rate{f' {lr:g}' if isinstance(lr, float) else ''} is too high"
            fix = "lower the learning rate (or warm it up), and clip gradients after scaler.unscale_(optimizer)"
            at = made.at if made is not None else at
        if origin is not None:
            message += f"; {describe(origin)}"
            at = origin.at if origin.at is not None and not grew else at
            if not grew:
                fix = "keep its input away from the point (an eps inside, a mask before): no scale can mend it"
        return Finding(
            rule="loss-scale-collapse",
            severity="error",
            at=at,
            message=message,
            evidence={
                "first_scale": run.first,
                "last_scale": run.scale,
                "falls": run.falls,
                "skips_in_a_row": run.longest,
                "grew": grew or None,
                "weights": run.weights,
                "losses": run.losses,
            },
            fix=fix,
            operator=(origin.node or origin.operator) if origin is not None else None,
            phase=origin.phase if origin is not None else None,
        )

    @staticmethod
    def _growth(run: _Run) -> str:
        """What grew before the collapse, in words; empty where nothing did."""
        weights, losses = _ratio(run.weights), _ratio(run.losses)
        if weights < _FOLLOWED or max(weights, losses) < _GREW:
            return ""
        grown = [f"the weights' norm grew from {run.weights[0]:.3g} to {run.weights[1]:.3g}"]
        if losses >= _GREW:
            grown.append(f"the loss from {run.losses[0]:.3g} to {run.losses[1]:.3g}")
        return " and ".join(grown)


def _ratio(ends: list[float]) -> float:
    return ends[1] / ends[0] if len(ends) == 2 and ends[0] > 0 else 1.0


def describe(event: NonFinite) -> str:
    """The origin of a non-finite value in words."""
    line = f" at line {event.at.line}" if event.at else ""
    if event.operator == "input":
        return f"the value was not finite before the first operator{line}"
    inputs = f" from inputs of at most {event.peak:.3g}" if event.peak is not None else ""
    if event.phase == "backward":
        return f"{event.node} (the gradient of what stands{line}) made {event.value}{inputs} ({event.operator})"
    return f"{event.operator}{line} made {event.value} in {event.dtype}{inputs}"
