"""Law 11: schedules move in their unit, with values known at once and with values read late."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import MixedPrecisionManager

lr = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda n: 1 / (1 + n)),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, total_iters=2), lr.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.LinearLR(o, total_iters=3), lr.ExponentialLR(o, 0.9)]),
}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """torch warns when a schedule moves before its optimizer: a skipped first update must not look like that."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make(fused: bool = True, rate: float | Tensor = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=rate, fused=fused)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if k != "_schedulers" and not callable(v) and k != "lr_lambdas"}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("fused", "tensor_lr"), [(True, False), (True, True), (False, False)])
def test_applied_updates_move_it_and_skipped_ones_do_not(kind: str, fused: bool, tensor_lr: bool, late: bool) -> None:
    rate = torch.tensor(0.1) if tensor_lr else 0.1
    model, optimizer = make(fused, rate)
    _, by_hand = make(fused, copy.deepcopy(rate))
    scheduler, expected = SCHEDULES[kind](optimizer), SCHEDULES[kind](by_hand)
    by_hand.step()
    manager = MixedPrecisionManager(precision="fp16")
    for number in range(8):
        skip = number in (0, 1, 4)
        manager.backward(model(torch.ones(1, 3)).sum() * (1e36 if skip else 1.0))
        update = manager.step(model, optimizer, scheduler)
        if number % 2:  # read now and then only: late values settle by themselves otherwise
            assert update.outcome == ("skipped" if skip else "applied")
        if not skip:
            expected.step()
    manager.report()
    assert float(optimizer.param_groups[0]["lr"]) == float(by_hand.param_groups[0]["lr"])
    assert plain(scheduler.state_dict()) == plain(expected.state_dict())
    assert manager.report()["counters"]["skipped"] == 3
    # what follows is the same too
    expected.step()
    manager.backward(model(torch.ones(1, 3)).sum())
    manager.step(model, optimizer, scheduler)
    manager.report()
    assert float(optimizer.param_groups[0]["lr"]) == float(by_hand.param_groups[0]["lr"])


def test_state_saved_right_after_step_is_right() -> None:
    model, optimizer = make()
    scheduler = SCHEDULES["ExponentialLR"](optimizer)
    manager = MixedPrecisionManager(precision="fp16")
    for skip, position in ((True, 0), (False, 1), (True, 1), (False, 2)):
        manager.backward(model(torch.ones(1, 3)).sum() * (1e36 if skip else 1.0))
        manager.step(model, optimizer, scheduler)
        assert scheduler.state_dict()["last_epoch"] == position


@pytest.mark.parametrize("fused", [True, False])
def test_attempted_updates_move_it_where_declared(fused: bool, late: bool) -> None:
    model, optimizer = make(fused)
    scheduler = SCHEDULES["ExponentialLR"](optimizer)
    manager = MixedPrecisionManager(precision="fp16", scheduler_unit="attempted")
    for skip in (True, False, True):
        manager.backward(model(torch.ones(1, 3)).sum() * (1e36 if skip else 1.0))
        manager.step(model, optimizer, scheduler)
    for group in manager.groups([torch.ones(1, 3)], 1, weight=lambda _: 0):
        for x in group:
            manager.backward(model(x).sum())
        assert manager.step(model, optimizer, scheduler).empty
    assert scheduler.last_epoch == 4


def test_the_users_own_calls_are_left_alone(late: bool) -> None:
    model, optimizer = make()
    scheduler = SCHEDULES["ExponentialLR"](optimizer)
    manager = MixedPrecisionManager(precision="bf16", scheduler_unit="calls")
    for number in range(4):
        manager.backward(model(torch.ones(1, 3)).sum())
        manager.step(model, optimizer, scheduler)
        if number % 2:
            scheduler.step()
    assert scheduler.last_epoch == 2


def test_per_epoch_schedules_stay_outside(late: bool) -> None:
    model, optimizer = make()
    epochs = lr.StepLR(optimizer, 1, gamma=0.5)
    plateau = lr.ReduceLROnPlateau(optimizer, patience=0)
    manager = MixedPrecisionManager(precision="fp32")
    for _ in range(2):
        for _ in range(3):
            manager.backward(model(torch.ones(1, 3)).sum())
            update = manager.step(model, optimizer)
        epochs.step()
        plateau.step(1.0)
    assert update.lr == 0.05
    assert epochs.last_epoch == 2


def test_the_rate_told_is_the_one_used(late: bool) -> None:
    for rate in (0.1, torch.tensor(0.1)):
        model, optimizer = make(rate=rate)
        scheduler = lr.ExponentialLR(optimizer, 0.5)
        manager = MixedPrecisionManager(precision="fp32")
        rates = []
        for _ in range(3):
            manager.backward(model(torch.ones(1, 3)).sum())
            rates.append(manager.step(model, optimizer, scheduler))
        assert [u.lr for u in rates] == pytest.approx([0.1, 0.05, 0.025])


def test_several_schedulers_for_several_optimizers(late: bool) -> None:
    first, of_first = make()
    second, of_second = make()
    schedulers = [lr.ExponentialLR(of_first, 0.5), lr.ExponentialLR(of_second, 0.1)]
    manager = MixedPrecisionManager(precision="fp16")
    for skip in (True, False):
        loss = (first(torch.ones(1, 3)) + second(torch.ones(1, 3))).sum()
        manager.backward(loss * (1e36 if skip else 1.0))
        manager.step([first, second], [of_first, of_second], schedulers)
    assert manager.report()["counters"] | {"micro_batches": 2} == manager.report()["counters"]
    assert of_first.param_groups[0]["lr"] == pytest.approx(0.05)
    assert of_second.param_groups[0]["lr"] == pytest.approx(0.01)
