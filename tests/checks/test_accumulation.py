"""Accumulation judged from events alone: what each group's coefficients add up to, and what a run's habit is."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Iterator, Sequence

import pytest

from halfstep.checks.accumulation.calls import Accumulation
from halfstep.checks.accumulation.denominators import Denominators
from halfstep.checks.accumulation.evidence import Evidence
from halfstep.checks.accumulation.supervision import Supervision
from halfstep.checks.accumulation.weights import Term, even, near, terms, whole
from halfstep.checks.judge import Judge
from halfstep.checks.story import Story
from halfstep.events import (
    Attempt,
    Contribution,
    Division,
    Event,
    Finding,
    GradientsCleared,
    GradientsEdited,
    ModuleCalled,
    ParametersChanged,
    Place,
    Share,
)

BACKWARD, STEP, CLEAR = Place("train.py", 20), Place("train.py", 22), Place("train.py", 23)


def share(total: float, elements: int, **more: object) -> Share:
    fields = {
        "loss": "cross_entropy",
        "reduction": "mean",
        "positions": elements,
        "supervised": elements,
        "weight_sum": float(elements),
        "divisor": None,
        "total": total,
        "coefficient": total / elements,
        "spread": 0.0,
        "ignored_share": 0.0,
        "targets": elements,
    } | more
    return Share(**fields)  # type: ignore[arg-type]


class Run:
    """Events of a run, numbered as they come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._seq = itertools.count(1)
        self._micro = 0

    def add(self, event: Event) -> None:
        self.events.append(dataclasses.replace(event, seq=next(self._seq), micro=self._micro))

    def backward(
        self, *shares: Share, optimizer: int = 1, route: int = 7, divisions: Sequence[float] = (), **more: object
    ) -> None:
        self.add(ModuleCalled(module=1, type="Net", training=True, grad_enabled=True, optimizers=(optimizer,)))
        self._micro += 1
        self.add(
            Contribution(
                at=BACKWARD,
                number=self._micro,
                optimizers={optimizer: 4},
                reached={optimizer: 99},
                shares=shares,
                loss=1.0,
                route=route,
                divisions=tuple(Division(by=d, at=BACKWARD) for d in divisions),
                **more,  # type: ignore[arg-type]
            )
        )

    def update(self, optimizer: int = 1, clear: bool = True, **more: object) -> None:
        self.add(Attempt(at=STEP, optimizer=optimizer, gradients=4, parameters=4, **more))  # type: ignore[arg-type]
        if clear:
            self.add(GradientsCleared(at=CLEAR, optimizers={optimizer: 4}, had=4))

    def findings(self) -> tuple[Finding, ...]:
        judge = Judge()
        for event in self.events:
            judge.see(event)
        judge.end()
        return judge.findings()

    def rules(self) -> dict[str, int]:
        return {f.rule: f.count for f in self.findings() if f.severity != "info"}


def groups(totals: Sequence[float], elements: Sequence[int], updates: int = 4, **more: object) -> Run:
    run = Run()
    for _ in range(updates):
        for total, n in zip(totals, elements, strict=True):
            run.backward(share(total, n), **more)  # type: ignore[arg-type]
        run.update()
    return run


RAGGED = [3, 42, 6, 27]


@pytest.mark.parametrize(
    ("totals", "elements", "rule"),
    [
        ([0.25] * 4, [8] * 4, None),
        ([0.25] * 4, RAGGED, "mean-of-means"),
        ([n / sum(RAGGED) for n in RAGGED], RAGGED, None),
        ([n / 100 for n in RAGGED], RAGGED, None),  # another denominator, but one and the same
        ([1.0] * 4, [8] * 4, "loss-not-divided"),
        ([1.0] * 4, RAGGED, "loss-not-divided"),  # the graver of the two
        ([8.0] * 4, [8] * 4, None),  # sums
        ([0.25] * 4, [64, 64, 64, 63], None),  # a ragged last batch, within reason
        ([0.1, 0.4, 0.3, 0.2], [8] * 4, None),  # weights of the author's own
    ],
)
def test_the_pattern_of_the_coefficients_names_the_rule(
    totals: list[float], elements: list[int], rule: str | None
) -> None:
    assert set(groups(totals, elements).rules()) == ({rule} if rule else set())


def test_half_precision_losses_are_compared_with_their_own_rounding() -> None:
    noisy = [0.2490, 0.2510, 0.2500, 0.2515]
    assert groups(noisy, [8] * 4, dtype="bfloat16").rules() == {}
    assert "mean-of-means" in groups(noisy, RAGGED, dtype="bfloat16").rules()


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_loss_scale_and_folded_division_are_taken_out(scale: float | None) -> None:
    run = Run()
    for _ in range(4):
        for n in RAGGED:
            run.backward(share(n * (scale or 1.0), n, reduction="sum"), scale=scale, scaler=1 if scale else None)
        run.update(divided_by=sum(RAGGED) * (scale or 1.0))  # one factor in the optimizer's own pass
    assert run.rules() == {}
    (term,) = terms([e for e in run.events if isinstance(e, Contribution)][:4], divided_by=sum(RAGGED) * (scale or 1.0))
    assert term.total == pytest.approx(1.0)
    assert term.deviation == pytest.approx(0.0, abs=1e-12)


def test_two_divisions_are_told_from_a_weight() -> None:
    twice = groups([1 / 16] * 4, [8] * 4, divisions=(4.0, 4.0)).findings()
    assert [f.rule for f in twice] == ["loss-divided-twice"]
    assert twice[0].evidence["sum_of_coefficients"] == pytest.approx(0.25)
    assert groups([1 / 16] * 4, [8] * 4, divisions=(4.0,)).rules() == {}  # a quarter of a loss, divided once
    assert groups([1 / 4] * 2, [8] * 2, divisions=(2.0, 2.0), updates=3).rules() == {"loss-divided-twice": 3}
    square = Run()
    for _ in range(4):
        for _ in range(2):
            square.backward(share(1 / 4, 8, loss="mse"), divisions=(2.0, 2.0))
        square.update()
    assert square.rules() == {}  # half a square


def test_gradients_divided_afterwards_count() -> None:
    run = Run()
    for _ in range(4):
        for _ in range(4):
            run.backward(share(1.0, 8))
        run.add(GradientsEdited(at=STEP, optimizers={1: 4}, operator="div_", factor=0.25))
        run.update()
    assert run.rules() == {}
    run = Run()
    for _ in range(4):
        for _ in range(4):
            run.backward(share(0.25, 8), divisions=(4.0,))
        run.add(GradientsEdited(at=STEP, optimizers={1: 4}, operator="div_", factor=0.25))
        run.update()
    assert run.rules() == {"loss-divided-twice": 4}


def test_losses_of_rivals_taking_turns_are_no_micro_batches() -> None:
    run = Run()
    for _ in range(6):
        for _ in range(2):
            run.backward(share(1.0, 8), optimizer=1, route=7)
        run.update(1)
        run.backward(share(1.0, 8), optimizer=2, route=8)
        run.update(2)
    assert run.rules() == {}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 4, 2] * 3, {"partial-group-underweighted": 3}),
        ([4, 4, 1], {"partial-group-underweighted": 1}),
        ([4, 3, 4, 4, 4, 4, 3, 4], {}),  # bad micro-batches left out
        ([4, 7, 7], {"leftover-micro-batches": 2}),
        ([4, 4, 8, 4], {}),  # not a rest
    ],
)
def test_groups_of_odd_sizes(sizes: list[int], expected: dict[str, int]) -> None:
    run = Run()
    for size in sizes:
        for _ in range(size):
            run.backward(share(0.25, 8), divisions=(4.0,))
        run.update()
    assert run.rules() == expected


def test_groups_that_grow_are_right() -> None:
    run = Run()
    for size in (1, 1, 2, 2, 3, 5, 8, 8):
        for _ in range(size):
            run.backward(share(1 / size, 8), divisions=(float(size),))
        run.update()
    assert run.rules() == {}


def test_a_clearing_of_some_parameters_is_none() -> None:
    run = Run()
    for _ in range(4):
        for _ in range(4):
            run.backward(share(0.25, 8), divisions=(4.0,))
            run.add(GradientsCleared(at=CLEAR, optimizers={1: 1}, had=1))
        run.update()
    assert run.rules() == {}


def test_clearing_is_judged_beside_changes_after_updates_and_scaled_gradients() -> None:
    run = Run()
    for _ in range(4):
        for _ in range(4):
            run.add(GradientsCleared(at=CLEAR, optimizers={1: 4}, had=4))
            run.backward(share(0.25, 8), divisions=(4.0,))
        run.add(GradientsEdited(at=STEP, optimizers={1: 4}, operator="mul_", factor=0.5))
        run.update(clear=False)
        run.add(ParametersChanged(at=STEP, optimizers={1: 4}, operator="clamp_"))
    assert run.rules() == {"zero-grad-mid-group": 4}
    run = Run()
    for _ in range(6):
        run.add(GradientsEdited(at=CLEAR, optimizers={1: 4}, operator="mul_", factor=0.9))
        run.backward(share(1.0, 8))
        run.update(clear=False)  # old gradients fade, as momentum does
    assert run.rules() == {}
    run = Run()
    for _ in range(6):
        run.backward(share(1.0, 8))
        run.add(GradientsEdited(at=STEP, optimizers={1: 4}, operator="mul_", factor=0.5))
        run.update(clear=False)
    assert run.rules() == {"gradients-never-cleared": 5}


def test_one_bad_update_is_no_habit() -> None:
    run = Run()
    for number in range(12):
        run.backward(share(1.0, 8))
        if number == 5:
            run.add(GradientsCleared(at=CLEAR, optimizers={1: 4}, had=4))
            run.backward(share(1.0, 8))
        run.update()
    assert run.rules() == {}


def test_counts_and_the_line_of_a_finding() -> None:
    (found,) = groups([0.25] * 4, RAGGED, updates=9).findings()
    assert found.count == 9
    assert found.at == BACKWARD
    assert found.evidence["elements"] == RAGGED


def test_terms_of_several_ranks_are_one() -> None:
    """What one rank alone cannot show: means of equal weight over unequal counts."""
    ranks = [Contribution(number=r, shares=(share(0.5, n),)) for r, n in enumerate((4, 60))]
    (term,) = terms(ranks)
    assert (term.total, term.elements) == (1.0, 64.0)
    assert term.alike
    assert term.deviation == pytest.approx(0.5 / 4 / (1 / 64) - 1)


def test_classes_that_weigh_differently_are_no_elements() -> None:
    run = Run()
    for _ in range(4):
        for weight in (5.0, 11.0, 8.0, 20.0):
            run.backward(share(0.25, 8, weight_sum=weight))
        run.update()
    assert run.rules() == {}


def test_numbers() -> None:
    assert whole(4.001) == 4
    assert whole(4.2) is None
    assert whole(float("nan")) is None
    assert near(1.003, 1.0)
    assert not near(1.01, 1.0)
    assert even([0.25, 0.2501])
    assert not even([])
    assert Term("mse", 0).parts() is None


def test_evidence_is_told_once_firm_and_counts_on() -> None:
    evidence = Evidence(least=2, share=0.5, weight="size")
    for size in (1, 5):
        evidence.chance()
        evidence.add(Finding(rule="r", severity="error", message="", at=STEP, evidence={"size": size}))
    (first,) = evidence.firm()
    assert (first.count, first.evidence["size"]) == (2, 5)
    assert list(evidence.firm()) == []
    evidence.chance()
    evidence.add(Finding(rule="r", severity="error", message="", at=CLEAR))
    (second,) = evidence.firm()
    assert (second.count, second.at) == (1, STEP)


def long_run(updates: int) -> Iterator[Event]:
    run = Run()
    for number in range(updates):
        task = number // 2 + 2  # an optimizer for every task
        for n in (3, 9):
            run.backward(share(0.5, n), share(0.1, 4, loss="mse"), divisions=(2.0,), loss_at=BACKWARD)
        run.update()
        run.backward(share(1.0, 4), optimizer=task, route=8)
        run.update(task)
        if number % 10 == 9:
            run.backward(share(0.5, 3), divisions=(2.0,))
            run.update(clear=number % 20 != 19)
        yield from run.events
        run.events.clear()


def test_what_checks_remember_is_bounded() -> None:
    def remembered(updates: int) -> int:
        checks, story = (Accumulation(), Denominators(), Supervision()), Story()
        for event in long_run(updates):
            for check in checks:
                list(check.see(event, story))
            update = story.tell(event)
            for check in checks:
                list(check.updated(update, story) if update is not None else ())
        assert story.sizes.total() == story.attempted
        return len(pickle.dumps((checks, story)))

    assert remembered(1_400) < 1.1 * remembered(700)


def test_what_was_seen_while_somebody_looked_holds_when_nobody_looks() -> None:
    """Gradients divided and zeroed through `.data` change no version counter: a look alone can see it."""
    run = Run()
    for number in range(60):
        for _ in range(4):
            run.backward(share(1.0, 8))
        if number < 5:
            run.add(GradientsEdited(at=STEP, optimizers={1: 4}, operator="div_", factor=0.25))
        run.update(clear=False)
        if number < 5:
            run.add(GradientsEdited(at=CLEAR, optimizers={1: 4}, operator="zero_", zeroed=True))
    assert run.rules() == {}
