"""Schedules: what advances the learning rate, and whether it gets to its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Attempt,
    Contribution,
    Ended,
    Event,
    Finding,
    GradientsCleared,
    OrderPassed,
    Place,
    Raised,
    SchedulerMade,
    SchedulerStepped,
    Started,
    StateLoaded,
)

_USUAL = 3  # so many times as often must a schedule follow an update as not, to be one that counts updates
_KEPT = 64
_SURE = 2  # groups in which a schedule must have advanced with the micro-batches
_NEAR = 0.02  # how far two counts may lie apart and still be meant as the same


@dataclass(slots=True)
class _Schedule:
    """What a schedule did between its own optimizer's contributions and attempts."""

    number: int
    made: SchedulerMade | None = None
    optimizer: int | None = None
    steps: int = 0
    last: SchedulerStepped | None = None
    first_position: int | None = None
    resumed: bool = False
    given: bool = False
    # since its last step
    contributions: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    cleared: bool = False  # gradients that no attempt used were thrown away
    # since its optimizer's last attempt
    with_micro: int = 0
    in_group: int = 0
    # over the run
    usual: int = 0  # steps that followed exactly one attempt
    by_hand: list[SchedulerStepped] = field(default_factory=list)  # advanced where no attempt was made
    micro_groups: int = 0  # groups in which it advanced with the micro-batches
    micro_steps: int = 0
    micro_at: Place | None = None
    peak: float = 0.0


class Schedules(BaseCheck):
    """All three rules of schedules: they rest on the same counts."""

    rules = ("scheduler-on-skipped-update", "scheduler-per-micro-batch", "schedule-never-finishes")

    def __init__(self) -> None:
        self._schedules: dict[int, _Schedule] = {}
        self._contributions: dict[int, int] = {}  # optimizer -> contributions that reached it
        self._world = 1
        self._passes = 0
        self._last_pass = 0
        self._ended: Ended | None = None
        self._raised: Raised | None = None
        self._doubtful: dict[int, tuple[SchedulerStepped, Attempt | None]] = {}

    def _schedule(self, ident: int) -> _Schedule:
        return self._schedules.setdefault(ident, _Schedule(ident))

    def _of(self, ident: int | None) -> list[_Schedule]:
        return [s for s in self._schedules.values() if s.optimizer == ident]

    # -- what happened -------------------------------------------------------------------------------------------

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case Started():
                self._world = event.world_size
            case SchedulerMade():
                schedule = self._schedule(event.scheduler)
                schedule.made, schedule.optimizer = event, event.optimizer
            case StateLoaded(kind="scheduler", ident=int(ident)):
                self._schedule(ident).resumed = True
            case Contribution():
                for ident in event.optimizers:
                    self._contributions[ident] = self._contributions.get(ident, 0) + 1
                for schedule in self._schedules.values():
                    if schedule.optimizer in event.optimizers:
                        schedule.contributions += 1
                        schedule.cleared = False
                        if self._doubtful.get(schedule.number, (None, True))[1] is None:
                            del self._doubtful[schedule.number]  # a group goes on: nothing was skipped by hand
            case GradientsCleared():
                self._cleared(event)
            case SchedulerStepped():
                yield from self._stepped(event, story)
            case OrderPassed() if event.micro > event.began:
                self._passes += 1
            case Raised():
                self._raised = event
            case Ended():
                self._ended = event
            case _:
                pass

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        for schedule in self._of(update.optimizer):
            schedule.attempts.append(update.attempt)
            del schedule.attempts[:-2]
            if schedule.with_micro and schedule.in_group >= 2:
                schedule.micro_groups += 1
                schedule.micro_steps += schedule.in_group
            schedule.with_micro = schedule.in_group = 0
        return ()

    def _stepped(self, event: SchedulerStepped, story: Story) -> Iterable[Finding]:
        schedule = self._schedule(event.scheduler)
        if schedule.optimizer is None:
            schedule.optimizer = event.optimizer
        if event.metric or event.optimizer is None:
            return
        yield from self._confirmed(event)
        if schedule.first_position is None and event.position is not None:
            schedule.first_position = event.position
        schedule.steps += 1
        schedule.last = event
        schedule.given = schedule.given or event.given
        schedule.peak = max(schedule.peak, event.lr_before or 0.0, event.lr_after or 0.0)
        attempts = schedule.attempts
        schedule.in_group += 1
        if not attempts and schedule.contributions == 1:
            schedule.with_micro += 1
            schedule.micro_at = event.at
        if not event.given:
            if len(attempts) == 1 and attempts[0].outcome == "applied":
                schedule.usual += 1
            elif len(attempts) == 1 and attempts[0].outcome == "skipped":
                self._doubtful[event.scheduler] = (event, attempts[0])
            elif not attempts and schedule.contributions and schedule.usual >= _USUAL:
                if schedule.cleared:
                    schedule.by_hand.append(event)
                else:
                    self._doubtful[event.scheduler] = (event, None)
        del schedule.by_hand[_KEPT:]
        schedule.contributions = 0
        schedule.cleared = False
        schedule.attempts = []

    # -- scheduler-on-skipped-update -----------------------------------------------------------------------------

    def _cleared(self, event: GradientsCleared) -> None:
        """Gradients that no attempt used were thrown away: an update skipped by hand."""
        for schedule in self._schedules.values():
            if schedule.optimizer not in event.optimizers:
                continue
            stepped, attempt = self._doubtful.get(schedule.number, (None, None))
            if stepped is not None and attempt is None:
                del self._doubtful[schedule.number]
                schedule.by_hand.append(stepped)
            schedule.cleared = schedule.contributions > 0 and not schedule.attempts

    def _confirmed(self, event: SchedulerStepped) -> Iterable[Finding]:
        """The next call shows whether the advance stayed (a manager may take it back once it knows of the skip)."""
        stepped, attempt = self._doubtful.pop(event.scheduler, (None, None))
        if stepped is None or attempt is None:
            return
        if None not in (event.position, stepped.position) and event.position == stepped.position:
            return
        yield self._on_skipped(stepped, "by the scaler" if attempt.via == "scaler" else "by the optimizer")

    def _on_skipped(self, event: SchedulerStepped, how: str) -> Finding:
        moved = ""
        if event.lr_before is not None and event.lr_after is not None and event.lr_before != event.lr_after:
            moved = f": the learning rate went from {event.lr_before:.3g} to {event.lr_after:.3g}"
        return Finding(
            rule="scheduler-on-skipped-update",
            severity="error",
            at=event.at,
            message=f"the schedule advanced to position {event.position} although the update was skipped {how}{moved}",
            evidence={
                "position": event.position,
                "lr_before": event.lr_before,
                "lr_after": event.lr_after,
                "skipped": how,
            },
            fix=(
                "before = scaler.get_scale(); scaler.step(optimizer); scaler.update(); "
                "if scaler.get_scale() >= before: scheduler.step()"
                if how != "by hand"
                else "call scheduler.step() only where optimizer.step() was called"
            ),
        )

    # -- at the end ----------------------------------------------------------------------------------------------

    def end(self, story: Story) -> Iterable[Finding]:
        for stepped, attempt in self._doubtful.values():
            schedule = self._schedules[stepped.scheduler]
            if attempt is not None and stepped.position is not None and schedule.steps > 1 and self._raised is None:
                yield self._on_skipped(stepped, "by the scaler")
        for schedule in self._schedules.values():
            if schedule.usual >= _USUAL * len(schedule.by_hand):
                yield from (self._on_skipped(stepped, "by hand") for stepped in schedule.by_hand)
            if schedule.made is not None and schedule.optimizer is not None and schedule.steps:
                yield from self._judge(schedule, story)

    def _judge(self, schedule: _Schedule, story: Story) -> Iterable[Finding]:
        optimizer = story.optimizer(schedule.optimizer or 0)
        micro = self._contributions.get(schedule.optimizer or 0, 0)
        steps, updates = schedule.steps, optimizer.attempts
        length = schedule.made.length if schedule.made is not None else None
        per_micro = (
            schedule.micro_groups >= _SURE
            and 2 * schedule.micro_groups >= updates
            and steps >= 1.5 * updates
            and not schedule.given
        )
        if per_micro and (length is None or steps > length * (1 + _NEAR) or self._tried_too_often()):
            yield self._per_micro_batch(schedule, steps, updates, length)
        elif length is not None and not per_micro:
            yield from self._never_finishes(schedule, steps, updates, micro, length, optimizer.usual_size() or 1)

    def _tried_too_often(self) -> bool:
        return self._raised is not None and "The specified number of total steps" in self._raised.message

    def _per_micro_batch(self, schedule: _Schedule, steps: int, updates: int, length: int | None) -> Finding:
        often = steps / max(updates, 1)
        meant = "" if length is None else f"; it is {length} calls long"
        return Finding(
            rule="scheduler-per-micro-batch",
            severity="error",
            at=schedule.micro_at,
            message=(
                f"the schedule advanced with every micro-batch: {steps} times for {updates} updates, "
                f"{often:.3g} times as fast as the updates{meant}"
            ),
            count=steps,
            evidence={"advanced": steps, "updates": updates, "length": length},
            fix="call scheduler.step() once an update, next to optimizer.step()",
        )

    def _never_finishes(
        self, schedule: _Schedule, steps: int, updates: int, micro: int, length: int, size: int
    ) -> Iterable[Finding]:
        made, last = schedule.made, schedule.last
        if made is None or last is None or schedule.resumed or schedule.given:
            return
        if schedule.first_position not in (None, 1):
            return  # it did not start at its beginning
        if self._raised is not None:
            if made.overrun == "raises" and self._tried_too_often():
                yield self._length(schedule, steps + 1, updates, length, f"the call after its {length} raised", size)
            return
        if self._ended is not None and (self._ended.by != "script" or self._ended.code not in (0, None)):
            return
        why = self._mismatch(made, steps, updates, micro, length, size)
        if why is not None:
            yield self._length(schedule, steps, updates, length, why, size)

    def _mismatch(
        self, made: SchedulerMade, steps: int, updates: int, micro: int, length: int, size: int
    ) -> str | None:
        """Which count the length was taken from, where it is not that of the calls; None where they fit."""
        world = self._world
        if steps < 2:
            return None
        if length >= 1.5 * steps:
            per_update = _near(steps, updates, 2)
            if per_update and micro >= 1.5 * updates and _covers(length, micro, size):
                return f"its length counts the {micro} micro-batches"
            if per_update and size > 1 and _covers(length, size * steps, size):
                return f"its length is {size} (the micro-batches of an update) times too long"
            if (
                per_update
                and world > 1
                and (_near(length, world * steps, world) or _near(length, world * micro, world))
            ):
                return f"its length counts what {world} replicas do together"
            if updates >= 3 * steps and (_near(length, updates, 1) or _near(length, micro, 1)):
                return f"its length counts the {updates} updates, and it advances {steps} times"
            return None
        if steps >= 1.5 * length and made.overrun in ("rises", "stays") and length >= 2:
            if self._passes and length == self._passes and _near(steps, updates, 2):
                return f"its length counts the {self._passes} epochs, and it advances with every update"
            if world > 1 and _near(steps, length * world, world):
                return f"its length was divided by the {world} replicas, each of which calls it {steps} times"
        return None

    def _length(self, schedule: _Schedule, steps: int, updates: int, length: int, why: str, size: int) -> Finding:
        made, last = schedule.made, schedule.last
        assert made is not None
        rate = last.lr_after if last is not None else None
        end = f", the learning rate ended at {rate:.3g} (largest {schedule.peak:.3g})" if rate is not None else ""
        gets = max(steps, updates) if size > 1 else steps
        return Finding(
            rule="schedule-never-finishes",
            severity="error",
            at=made.at,
            message=(
                f"the schedule is {length} calls long and was called {steps} times for {updates} updates: {why}{end}"
            ),
            evidence={
                "length": length,
                "calls": steps,
                "updates": updates,
                "micro_batches_per_update": size,
                "lr_last": rate,
                "lr_peak": schedule.peak,
            },
            fix=f"give it the number of calls it will get: {made.type} over {gets}",
        )


def _covers(length: float, count: float, tail: float) -> bool:
    """Whether a length was meant for ``count`` calls and the rest of a group: it is not shorter than what ran."""
    return -_NEAR * count <= length - count <= max(tail, _NEAR * count)


def _near(a: float, b: float, slack: float) -> bool:
    """Whether two counts are meant as the same: within ``slack`` or two percent."""
    return abs(a - b) <= max(slack, _NEAR * max(a, b))
