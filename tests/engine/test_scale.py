"""Law 3: the loss scale moves once a group; it is a GradScaler's, with a floor, a history and a hand on it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import MixedPrecisionManager, PolicyError, ScaleFloorError


def make(**policy: Any) -> tuple[nn.Module, torch.optim.Optimizer, MixedPrecisionManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, MixedPrecisionManager(precision="fp16", **policy)


def attempt(model: nn.Module, optimizer: torch.optim.Optimizer, manager: MixedPrecisionManager, overflow: bool) -> Any:
    manager.backward(model(torch.ones(1, 3)).sum() * (1e37 if overflow else 1.0))
    return manager.step(model, optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_it_moves_as_torchs_scaler_does(fused: bool, late: bool) -> None:
    model, _, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    policy = {"init_scale": 256.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    manager = MixedPrecisionManager(precision="fp16", min_scale=2.0**-126, **policy)
    twin = nn.Linear(1, 1)
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **policy)
    for overflow in (False, True, True, False, False, False, False, False, True, False, False, False):
        update = attempt(model, optimizer, manager, overflow)
        assert update.scale == scaler.get_scale()
        scaler.scale(twin(torch.ones(1, 1)).sum() * (1e37 if overflow else 1.0)).backward()
        scaler.step(by_hand)
        scaler.update()
        by_hand.zero_grad()
        assert manager.loss_scale == scaler.get_scale()
        assert manager.state_dict()["scaler"] == scaler.state_dict()


def test_state_goes_both_ways() -> None:
    _, _, manager = make(growth_interval=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    twin = nn.Linear(1, 1)
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.0)
    for _ in range(3):
        scaler.scale(twin(torch.ones(1, 1)).sum()).backward()
        scaler.step(by_hand)
        scaler.update()
        by_hand.zero_grad()
    manager.load_state_dict(scaler.state_dict())
    assert manager.loss_scale == 512.0
    assert manager.scaler.state_dict() == scaler.state_dict()
    assert manager.scaler.state_dict()["_growth_tracker"] == 3
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(manager.state_dict()["scaler"])
    assert other.state_dict() == scaler.state_dict()
    third = MixedPrecisionManager(precision="fp16")
    third.scaler.load_state_dict(scaler.state_dict())
    assert third.loss_scale == 512.0
    with pytest.raises(PolicyError, match="as a disabled GradScaler's"):
        manager.load_state_dict({})
    assert manager.loss_scale == 512.0
    without = MixedPrecisionManager(precision="bf16")
    without.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert without.loss_scale == 1.0


def test_a_run_without_a_scale_keeps_the_one_it_was_given() -> None:
    _, _, manager = make(init_scale=64.0)
    state = manager.state_dict()
    plain = MixedPrecisionManager(False)
    plain.load_state_dict(state)
    assert plain.loss_scale == 1.0
    assert plain.scaler.is_enabled() is False
    assert plain.scaler.state_dict() == {}
    again = MixedPrecisionManager(precision="fp16")
    again.load_state_dict(plain.state_dict())
    assert again.loss_scale == 64.0


def test_static_scale_skips_and_stays(late: bool) -> None:
    model, optimizer, manager = make(dynamic=False, init_scale=128.0, growth_interval=1)
    outcomes = [attempt(model, optimizer, manager, overflow).outcome for overflow in (False, True, False)]
    assert outcomes == ["applied", "skipped", "applied"]
    assert manager.loss_scale == 128.0
    assert [entry["why"] for entry in manager.scale_history] == ["first"]


def test_history_is_data(late: bool) -> None:
    model, optimizer, manager = make(growth_interval=2, init_scale=1024.0)
    for overflow in (True, False, False, True):
        attempt(model, optimizer, manager, overflow)
    manager.loss_scale = 8
    attempt(model, optimizer, manager, False)
    path = [(entry["update"], entry["scale"], entry["why"]) for entry in manager.scale_history]
    assert path == [
        (0, 1024.0, "first"),
        (1, 512.0, "overflow"),
        (3, 1024.0, "growth"),
        (4, 512.0, "overflow"),
        (4, 8.0, "by hand"),
    ]
    assert manager.report()["loss_scale"]["path"] == manager.scale_history


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 2.0**200])
def test_scales_that_are_none(value: float) -> None:
    _, _, manager = make()
    with pytest.raises(PolicyError, match="loss_scale"):
        manager.loss_scale = value
    assert manager.loss_scale == 2.0**16


def test_the_floor(late: bool) -> None:
    """Three overflows in a row that cannot lower the scale: an error with names, history and remedies."""
    model, optimizer, manager = make(init_scale=16.0, min_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]

    def overflow() -> None:
        x = torch.ones(1, 3)
        manager.backward(model(x).sum() + model[1].bias[0] * float("inf"))
        manager.step(model, optimizer)

    for _ in range(4):  # 16 -> 8 -> 4, then two touches
        overflow()
    attempt(model, optimizer, manager, False)  # healthy again: the count starts anew
    manager.load_state_dict(manager.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    overflow()
    overflow()
    if late:  # on an accelerator it is known by the next update only
        overflow()
        manager.backward(model(torch.ones(1, 3)).sum())
    with pytest.raises(ScaleFloorError) as caught:
        manager.step(model, optimizer) if late else overflow()
    text = str(caught.value)
    for part in ("1.bias", "1 of 4 parameters", "floor of 4", "8 (overflow)", "keep_fp32", "bf16"):
        assert part in text, part
    assert manager.loss_scale == 4.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert manager.report()["counters"]["skipped"] == 7


def test_one_scale_while_several_optimizers_are_pending() -> None:
    """The scale moves after the last optimizer whose gradients it is in, once, if any of them overflowed."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    of_first = torch.optim.SGD(first.parameters(), lr=0.1, fused=True)
    of_second = torch.optim.SGD(second.parameters(), lr=0.1, fused=True)
    manager = MixedPrecisionManager(precision="fp16", init_scale=64.0)
    for overflowing in ((True, False), (False, True), (True, True)):
        before = manager.loss_scale
        for model, overflow in zip((first, second), overflowing, strict=True):
            manager.backward(model(torch.ones(1, 2)).sum() * (1e38 if overflow else 1.0))
        one = manager.step(first, of_first)
        assert manager.loss_scale == before
        two = manager.step(second, of_second)
        assert manager.loss_scale == before / 2
        assert (one.skipped, two.skipped) == overflowing
        assert one.scale == two.scale == before


def test_copies_of_the_scaler_are_torchs() -> None:
    """Trainers log and pickle it."""
    model, optimizer, manager = make()
    attempt(model, optimizer, manager, True)
    assert copy.deepcopy(manager.scaler).get_scale() == manager.scaler.get_scale() == 2.0**15
