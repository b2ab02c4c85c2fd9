"""Schedules judged from events alone: lengths against what ran, advances taken back, runs that were cut short."""

from __future__ import annotations

import pytest

from halfstep.checks.judge import Judge
from halfstep.events import (
    Attempt,
    AverageUpdated,
    Contribution,
    Ended,
    Event,
    Finding,
    OptimizerMade,
    Outcome,
    Place,
    Raised,
    SchedulerMade,
    SchedulerStepped,
    Started,
    StateLoaded,
)

MADE, STEPPED = Place("train.py", 10), Place("train.py", 30)


def judged(*events: Event) -> list[Finding]:
    judge = Judge()
    for event in events:
        judge.see(event)
    judge.end()
    rules = (
        "scheduler-on-skipped-update",
        "scheduler-per-micro-batch",
        "schedule-never-finishes",
        "ema-per-micro-batch",
    )
    return [f for f in judge.findings() if f.rule in rules]


def run(
    length: int | None,
    updates: int,
    micro: int = 1,
    *,
    world: int = 1,
    overrun: str = "rises",
    loaded: bool = False,
    last: Event | None = None,
) -> list[Event]:
    """``updates`` of ``micro`` contributions, the schedule called once after each."""
    out: list[Event] = [
        Started(world_size=world),
        OptimizerMade(optimizer=1, type="SGD", parameters=2, elements=8),
        SchedulerMade(at=MADE, scheduler=1, optimizer=1, type="CosineAnnealingLR", length=length, overrun=overrun),
    ]
    if loaded:
        out.append(StateLoaded(kind="scheduler", ident=1))
    number = 0
    for update in range(1, updates + 1):
        for _ in range(micro):
            number += 1
            out.append(Contribution(number=number, optimizers={1: 2}))
        out.append(Attempt(optimizer=1, gradients=2, parameters=2))
        out.append(SchedulerStepped(at=STEPPED, scheduler=1, optimizer=1, position=update, lr_before=0.1, lr_after=0.1))
    return [*out, last if last is not None else Ended(code=0)]


@pytest.mark.parametrize(
    ("length", "updates", "micro", "world", "wrong"),
    [
        (24, 24, 4, 1, False),
        (96, 24, 4, 1, True),  # counts micro-batches
        (99, 25, 4, 1, True),  # the same with a short last group
        (48, 24, 1, 2, True),  # counts what two replicas do
        (192, 24, 4, 2, True),  # both
        (12, 24, 1, 2, True),  # divided by the replicas, each of which calls it for itself
        (48, 24, 1, 1, False),  # stopped half-way, or longer on purpose
        (250, 24, 4, 1, False),
        (23, 24, 4, 1, False),
        (12, 24, 2, 1, False),  # down and up again
        (None, 24, 4, 1, False),
    ],
)
def test_length_against_the_run(length: int | None, updates: int, micro: int, world: int, wrong: bool) -> None:
    found = judged(*run(length, updates, micro, world=world))
    assert [f.rule for f in found] == ["schedule-never-finishes"] * wrong
    if wrong:
        assert found[0].at == MADE
        assert found[0].evidence["length"] == length
        assert found[0].evidence["calls"] == updates


@pytest.mark.parametrize(
    "last",
    [
        Ended(code=0, by="halfstep"),  # --updates
        Ended(code=1),
        Raised(type="KeyboardInterrupt", message=""),
    ],
)
def test_a_run_that_was_cut_short_says_nothing_of_lengths(last: Event) -> None:
    assert judged(*run(96, 24, 4, last=last)) == []
    assert judged(*run(96, 24, 4, loaded=True)) == []


def test_the_exception_of_a_schedule_that_is_too_short_is_explained() -> None:
    error = Raised(type="ValueError", message="Tried to step 13 times. The specified number of total steps is 12")
    found = judged(*run(12, 12, overrun="raises", last=error))
    assert [(f.rule, f.at) for f in found] == [("schedule-never-finishes", MADE)]


def skipping(outcomes: list[Outcome], positions: list[int]) -> list[Event]:
    out: list[Event] = [SchedulerMade(scheduler=1, optimizer=1, type="LambdaLR")]
    for number, (outcome, position) in enumerate(zip(outcomes, positions, strict=True), 1):
        out.append(Contribution(number=number, optimizers={1: 2}))
        out.append(Attempt(optimizer=1, outcome=outcome, via="scaler", scaler=1))
        out.append(SchedulerStepped(at=STEPPED, scheduler=1, optimizer=1, position=position))
    return [*out, Ended(code=0)]


def test_advances_on_skipped_updates_are_counted() -> None:
    found = judged(*skipping(["skipped", "applied", "skipped", "applied"], [1, 2, 3, 4]))
    assert [(f.rule, f.at, f.count) for f in found] == [("scheduler-on-skipped-update", STEPPED, 2)]


def test_an_advance_that_was_taken_back_is_none() -> None:
    """A manager may advance at once and take it back when it learns of the skip: the next position is the same."""
    assert judged(*skipping(["applied", "skipped", "applied", "applied"], [1, 2, 2, 3])) == []


def test_a_schedule_of_epochs_does_not_care() -> None:
    events: list[Event] = [SchedulerMade(scheduler=1, optimizer=1, type="StepLR")]
    for epoch in range(1, 4):
        for number in range(3):
            events.append(Contribution(number=3 * epoch + number, optimizers={1: 2}))
            events.append(Attempt(optimizer=1, outcome="skipped" if number == 2 else "applied", via="scaler", scaler=1))
        events.append(SchedulerStepped(at=STEPPED, scheduler=1, optimizer=1, position=epoch))
    assert judged(*events, Ended(code=0)) == []


@pytest.mark.parametrize(
    ("length", "expected"), [(None, ["scheduler-per-micro-batch"]), (6, ["scheduler-per-micro-batch"]), (24, [])]
)
def test_a_schedule_that_moves_with_the_micro_batches(length: int | None, expected: list[str]) -> None:
    events: list[Event] = [SchedulerMade(at=MADE, scheduler=1, optimizer=1, type="StepLR", length=length)]
    for number in range(1, 25):
        events.append(Contribution(number=number, optimizers={1: 2}))
        if number % 4 == 0:
            events.append(Attempt(optimizer=1))
        events.append(SchedulerStepped(at=STEPPED, scheduler=1, optimizer=1, position=number))
    found = judged(*events, Ended(code=0))
    assert [f.rule for f in found] == expected
    assert all(f.at == STEPPED for f in found)


@pytest.mark.parametrize(("where", "wrong"), [("after the update", False), ("after each micro-batch", True)])
def test_an_average_moves_once_an_update(where: str, wrong: bool) -> None:
    events: list[Event] = []
    average = AverageUpdated(at=STEPPED, average=1, optimizers={1: 2}, decay=0.9)
    for number in range(1, 13):
        events.append(Contribution(number=number, optimizers={1: 2}))
        if number % 3 == 0:
            events.append(Attempt(optimizer=1))
        if wrong or number % 3 == 0:
            events.append(average)
    found = judged(*events, Ended(code=0))
    assert [f.rule for f in found] == ["ema-per-micro-batch"] * wrong
    if wrong:
        assert found[0].count == 7  # the first has nothing before it
        assert "0.729" in found[0].message  # 0.9 to the power 3
