"""Pickled and copied managers: independent, and the run goes on bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import MisuseError, MixedPrecisionManager

WAYS = [copy.copy, copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))]
SETTINGS: dict[str, Any] = {"precision": "fp16", "device": "cpu", "init_scale": 2.0**18, "growth_interval": 2}


class Counting(MixedPrecisionManager):
    """A user's own subclass, with an attribute and another signature."""

    def __init__(self, name: str) -> None:
        super().__init__(**SETTINGS)
        self.names = [name]


def parts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    return model, torch.optim.AdamW(model.parameters(), fused=True), list(torch.randn(9, 3, 4))


def update(manager: MixedPrecisionManager, model: nn.Module, optimizer: Any, group: Any) -> Any:
    for batch in group:
        with manager.context():
            loss = F.mse_loss(model(batch).float(), batch[:, :2])
        manager.backward(loss)
    return manager.step(model, optimizer)


@pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_goes_on_where_the_manager_was(way: Callable[[Any], Any]) -> None:
    model, optimizer, batches = parts()
    manager = MixedPrecisionManager(**SETTINGS, max_norm=0.5)
    groups = manager.groups(batches, 2)
    for _ in range(3):
        update(manager, model, optimizer, next(groups))
    other_model = copy.deepcopy(model)
    other_optimizer = torch.optim.AdamW(other_model.parameters(), fused=True)
    other_optimizer.load_state_dict(optimizer.state_dict())
    other = way(manager)
    assert repr(other) == repr(manager)
    assert other.scale_history == manager.scale_history
    assert len(manager.scale_history) > 1
    for group, same in zip(groups, other.groups(batches, 2), strict=True):  # the rest of the epoch
        done = update(manager, model, optimizer, group)
        again = update(other, other_model, other_optimizer, same)
        assert str(again.as_dict(layers=True)) == str(done.as_dict(layers=True))
        assert all(map(torch.equal, model.parameters(), other_model.parameters()))
    assert other.report()["counters"] == manager.report()["counters"]


@pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_is_independent(way: Callable[[Any], Any]) -> None:
    model, optimizer, batches = parts()
    manager = MixedPrecisionManager(**SETTINGS)
    other = way(manager)
    before = manager.state_dict()
    for group in other.groups(batches, 3):
        update(other, model, optimizer, group)
    assert manager.state_dict() == before
    assert manager.report()["counters"]["attempted"] == 0


@pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle"])
def test_what_a_subclass_adds_is_kept(way: Callable[[Any], Any]) -> None:
    manager = Counting("a")
    other = way(manager)
    assert type(other) is Counting
    assert other.names == ["a"]
    assert (other.names is manager.names) == (way is copy.copy)


@pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle"])
def test_inside_a_group_it_is_refused(way: Callable[[Any], Any]) -> None:
    model, _, batches = parts()
    manager = MixedPrecisionManager(False)
    group = next(manager.groups(batches, 2))
    with pytest.raises(MisuseError, match="between groups"):
        way(manager)
    manager.backward(model(next(group)).sum())
    with pytest.raises(MisuseError, match="state_dict"):
        way(manager)


def test_what_cannot_be_pickled_is_said() -> None:
    rows: list[Any] = []
    manager = MixedPrecisionManager(False, record=lambda row: rows.append(row))
    with pytest.raises(MisuseError, match="record=") as caught:
        pickle.dumps(manager)
    assert "state_dict" in caught.value.fix
    model, optimizer, batches = parts()
    twin = copy.deepcopy(manager)
    update(twin, model, optimizer, next(twin.groups(batches, 1)))
    assert len(rows) == 1
