"""The scaling family on runs written by hand: what takes thousands of updates, and what stays silent for as long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from halfstep.checks.judge import Judge
from halfstep.checks.scaling.carried import carried
from halfstep.checks.story import Story
from halfstep.events import (
    Attempt,
    Clipped,
    Contribution,
    Event,
    Finding,
    GradientsCleared,
    GradientsEdited,
    OptimizerMade,
    Place,
    ScaleRead,
    ScalerMade,
    ScaleUpdated,
    Unscaled,
)


class Script:
    """Writes the events of one optimizer under one scaler; a line number is a place."""

    def __init__(self, scale: float = 65536.0) -> None:
        self.events: list[Event] = []
        self.scale = scale
        self.number = 0
        self._add(OptimizerMade, 1, optimizer=1, type="SGD", parameters=1, elements=1, options={"lr": 0.1})
        self._add(ScalerMade, 2, scaler=1, scale=scale)

    def _add(self, event: type[Event], line: int, /, **fields: object) -> None:
        at = Place("train.py", line)
        self.events.append(event(seq=len(self.events) + 1, at=at, micro=self.number, **fields))  # type: ignore[arg-type]

    def clear(self) -> None:
        self._add(GradientsCleared, 9, optimizers={1: 1})

    def backward(self, loss: float = 1.0) -> None:
        self.number += 1
        self._add(
            Contribution,
            10,
            number=self.number,
            optimizers={1: 1},
            reached={1: 7},
            scale=self.scale,
            scaler=1,
            loss=loss * self.scale,
            autocast="float16",
        )

    def unscale(self) -> None:
        self._add(Unscaled, 11, scaler=1, optimizer=1, scale=self.scale, found_inf=False, optimizers={1: 1})

    def clip(self, limit: float, norm: float) -> None:
        self._add(Clipped, 12, kind="norm", limit=limit, norm=norm, optimizers={1: 1})

    def edit(self, factor: float | None, operator: str | None = "mul_") -> None:
        self._add(GradientsEdited, 12, optimizers={1: 1}, operator=operator, factor=factor)

    def read_scale(self, how: str = "computing", line: int = 11) -> None:
        self._add(ScaleRead, line, scaler=1, how=how)

    def step(self, skipped: bool = False, weights: float = 1.0) -> None:
        outcome = "skipped" if skipped else "applied"
        self._add(
            Attempt, 13, optimizer=1, via="scaler", scaler=1, outcome=outcome, weights=None if skipped else weights
        )

    def update(self, factor: float = 1.0) -> None:
        before, self.scale = self.scale, self.scale * factor
        self._add(ScaleUpdated, 14, scaler=1, before=before, after=self.scale)

    def whole_update(self, skipped: bool = False, grows: bool = False, weights: float = 1.0, loss: float = 1.0) -> None:
        self.clear()
        self.backward(loss)
        self.step(skipped, weights)
        self.update(0.5 if skipped else 2.0 if grows else 1.0)


def judged(events: Iterable[Event]) -> tuple[Finding, ...]:
    judge = Judge()
    for event in events:
        judge.see(event)
    judge.end()
    assert not [f for f in judge.findings() if f.rule == "halfstep-internal"]
    return tuple(f for f in judge.findings() if f.severity != "info")


def skips(pattern: Iterator[bool] | Iterable[bool], scale: float = 65536.0) -> tuple[Finding, ...]:
    script = Script(scale)
    for skipped in pattern:
        script.whole_update(skipped)
    return judged(script.events)


@pytest.mark.parametrize("first", [1024.0, 65536.0, 2.0**40])
def test_a_scale_that_settles_is_healthy(first: float) -> None:
    script = Script(first)
    while script.scale > 64.0:
        script.whole_update(skipped=True)
    for _ in range(50):
        script.whole_update()
    assert judged(script.events) == ()


def test_growing_and_falling_back_for_five_thousand_updates_is_healthy() -> None:
    script = Script(4096.0)
    for number in range(5000):
        overflows = script.scale > 8192.0
        script.whole_update(skipped=overflows, grows=not overflows and number % 50 == 49)
    assert judged(script.events) == ()


def test_a_tenth_of_the_batches_makes_nan_and_the_scale_never_recovers() -> None:
    found = skips(number % 10 == 3 for number in range(400))
    assert [f.rule for f in found] == ["loss-scale-collapse"]
    assert found[0].evidence["last_scale"] < 1.0
    assert found[0].at is not None
    assert found[0].at.line == 13


def test_weights_that_grew_before_the_collapse_blame_the_learning_rate() -> None:
    script = Script(1024.0)
    for number in range(5):
        script.whole_update(weights=10.0**number, loss=10.0**number)
    for _ in range(20):
        script.whole_update(skipped=True)
    (found,) = judged(script.events)
    assert found.rule == "loss-scale-collapse"
    assert found.at is not None
    assert found.at.line == 1
    assert "grew from 1 to 1e+04" in found.message
    assert "0.1" in found.message


@pytest.mark.parametrize(
    ("limit", "reads", "wrong"),
    [
        (1.0, False, True),
        (10.0, False, True),
        (512.0, False, False),  # a limit that is the scale, written as a number
        (1.0, True, False),  # a small limit, computed with the scale
        (0.1, True, True),  # the scale was read for something else
    ],
)
def test_whether_a_limit_carries_the_scale(limit: float, reads: bool, wrong: bool) -> None:
    script = Script(512.0)
    for _ in range(3):
        script.clear()
        script.backward()
        if reads:
            script.read_scale()
        script.clip(limit, norm=700.0)
        script.step()
        script.update()
    assert [f.rule for f in judged(script.events)] == (["clip-scaled-gradients"] if wrong else [])


def test_a_limit_that_stays_while_the_scale_moves_does_not_carry_it() -> None:
    script = Script(4.0)
    for grows in (True, True, True):
        script.clear()
        script.backward()
        script.clip(1.0, norm=20.0)
        script.step()
        script.update(4.0 if grows else 1.0)
    found = judged(script.events)
    assert [f.rule for f in found] == ["clip-scaled-gradients"]
    assert found[0].evidence["scale"] == 16.0  # at the first scale, a quarter may have been meant


def test_what_gradients_carry_follows_every_edit() -> None:
    script, story = Script(256.0), Story()
    script.backward()
    script.edit(0.5)
    script.edit(1 / 256)
    script.backward()
    for event in script.events:
        story.tell(event)
    now = carried(story.optimizer(1))
    assert now.scale == 256.0
    assert now.mixed
    assert len(now.late) == 1
    assert carried(story.optimizer(1), before=script.events[-1].seq).scale is None
    assert carried(story.optimizer(1), before=script.events[-2].seq).scale == 256.0


def test_an_edit_nobody_looked_at_claims_nothing() -> None:
    script = Script(256.0)
    for _ in range(3):
        script.clear()
        script.backward()
        script.edit(None, operator=None)
        script.clip(1.0, norm=3.0)
        script.step()
        script.update()
    assert judged(script.events) == ()


def test_repeats_of_one_fault_are_one_finding_with_a_count() -> None:
    script = Script()
    for _ in range(7):
        script.clear()
        script.backward()
        script.clip(1.0, norm=65536.0)
        script.step()
        script.update()
    (found,) = judged(script.events)
    assert found.count == 7
    assert "the loss scale 65536" in found.message
    assert "1.5e-05" in found.message
