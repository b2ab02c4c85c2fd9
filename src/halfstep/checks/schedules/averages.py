"""Averages of weights: how often they are updated, and whether they can move at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import AverageUpdated, Contribution, Event, Finding, ParametersChanged

_SURE = 2  # updates of an average over unchanged weights that are no accident
_LOOKED = 4  # updates of a half-precision average compared with the values before
_STILL = 0.75


@dataclass(slots=True)
class _Average:
    last: AverageUpdated | None = None
    updates: int = 0
    moved: bool = False  # the weights changed since its last update
    contributions: int = 0
    skipped: int = 0
    micro: int = 0  # updates between contributions of one group
    on_skipped: int = 0
    looked: int = 0
    still: float = 0.0


class Averages(BaseCheck):
    """An average moves once an applied update; in half precision it may not move at all."""

    rules = ("ema-per-micro-batch",)

    def __init__(self) -> None:
        self._averages: dict[int, _Average] = {}

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case Contribution():
                for average in self._of(event.optimizers):
                    average.contributions += 1
            case ParametersChanged():
                for average in self._of(event.optimizers):
                    average.moved = True
            case AverageUpdated() if event.optimizers:
                self._updated(event)
            case _:
                pass
        return ()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        for average in self._of((update.optimizer,)):
            if update.attempt.outcome == "applied":
                average.moved = True
            else:
                average.skipped += 1
        return ()

    def _of(self, optimizers: Iterable[int]) -> Iterable[_Average]:
        wanted = set(optimizers)
        return [a for a in self._averages.values() if a.last is not None and wanted & set(a.last.optimizers)]

    def _updated(self, event: AverageUpdated) -> None:
        average = self._averages.setdefault(event.average, _Average())
        if average.updates and not average.moved:
            if average.skipped:
                average.on_skipped += 1
            elif average.contributions:
                average.micro += 1
        average.last = event
        average.updates += 1
        average.moved = False
        average.contributions = average.skipped = 0
        if event.still is not None:
            average.looked += 1
            average.still += event.still

    def end(self, story: Story) -> Iterable[Finding]:
        for average in self._averages.values():
            event = average.last
            if event is None:
                continue
            if average.micro >= _SURE:
                yield self._too_often(average, event, "between the micro-batches of one update", average.micro)
            elif average.on_skipped >= _SURE:
                yield self._too_often(average, event, "after a skipped update", average.on_skipped)
            if average.looked >= _LOOKED and average.still >= _STILL * average.looked:
                yield self._stands(average, event)

    def _too_often(self, average: _Average, event: AverageUpdated, when: str, times: int) -> Finding:
        first = average.micro >= _SURE  # it came before the first update of the weights
        often = average.updates / max(average.updates - times - first, 1)
        decay = ""
        if event.decay is not None and 0 < event.decay < 1:
            decay = f"; its decay of {event.decay:g} acts as {event.decay**often:.3g} an update"
        return Finding(
            rule="ema-per-micro-batch",
            severity="error",
            at=event.at,
            count=times,
            message=(
                f"the average of the weights was updated {times} of {average.updates} times {when}, "
                f"over weights that had not changed{decay}"
            ),
            evidence={"updates_of_the_average": average.updates, "over_unchanged_weights": times, "decay": event.decay},
            fix=(
                "update the average once, right after optimizer.step()"
                if average.micro >= _SURE
                else "update the average only where the update was applied: if scaler.get_scale() >= scale_before: ..."
            ),
        )

    def _stands(self, average: _Average, event: AverageUpdated) -> Finding:
        share = average.still / average.looked
        return Finding(
            rule="updates-rounded-away",
            severity="warning",
            at=event.made_at or event.at,
            message=(
                f"{share:.0%} of the elements of a {event.dtype} average of the weights that were far from their "
                f"weight did not move: a share of {1 - (event.decay or 0.0):.2g} of the way is less than the spacing "
                f"of {event.dtype}"
            ),
            evidence={"still": share, "looked_at": average.looked, "decay": event.decay, "dtype": event.dtype},
            fix="keep the average in FP32: ema.load_state_dict(model.state_dict()) into a float32 copy of the model",
        )
