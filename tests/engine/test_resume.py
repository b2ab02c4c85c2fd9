"""Law 8: saved at any update boundary, loaded in a new process, continued bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from halfstep import MixedPrecisionManager, PolicyError

STOPS = (1, 3, 4, 6)  # applied or not: mid-epoch, at an epoch's end (4 groups of 3, the last one short), in the next


def build(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    manager = MixedPrecisionManager(precision="fp16", init_scale=2.0**22, growth_interval=2, max_norm=0.5)
    data = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
    own = {"own generator": {"generator": torch.Generator().manual_seed(3)}, "global generator": {}}[kind]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "manager": manager,
        "loader": DataLoader(data, batch_size=2, shuffle=True, **own),
    }


def train(run: dict[str, Any], updates: int) -> list[dict[str, Any]]:
    """Train to this many attempted updates in all, over as many epochs as that takes."""
    manager, rows = run["manager"], []
    while True:
        for group in manager.groups(run["loader"], 3):
            for x, y in group:
                with manager.context():
                    out = run["model"](x)
                manager.backward(F.cross_entropy(out.float(), y))
            update = manager.step(run["model"], run["optimizer"], run["scheduler"])
            rows.append(update.as_dict())
            if update.attempted_updates == updates:
                return rows


def save(run: dict[str, Any], path: Path) -> None:
    torch.save({k: run[k].state_dict() for k in ("model", "optimizer", "scheduler", "manager")}, path)


def load(run: dict[str, Any], path: Path) -> None:
    state = torch.load(path, weights_only=True)
    for name, value in state.items():
        run[name].load_state_dict(value)


def continued(folder: str, updates: int) -> None:
    """What the new process does: it goes on from every save in the folder."""
    for source in sorted(Path(folder).glob("at *")):
        kind = source.name.split(", ")[1]
        run = build(kind)
        load(run, source)
        torch.manual_seed(12345)  # a process that starts elsewhere: the order of the data must not depend on it
        rows = train(run, updates)
        save(run, source.with_name(source.name.replace("at ", "from ", 1)))
        torch.save(repr(rows), source.with_name(source.name.replace("at ", "rows ", 1)))


@pytest.mark.processes
def test_bit_identical_in_a_new_process(tmp_path: Path) -> None:
    expected = {}
    for kind in ("own generator", "global generator"):
        whole = build(kind)
        rows = train(whole, 10)
        save(whole, tmp_path / "whole")
        expected[kind] = (rows, torch.load(tmp_path / "whole", weights_only=True))
        for stop in STOPS:
            run = build(kind)
            train(run, stop)
            save(run, tmp_path / f"at {stop}, {kind}")
    code = "import sys; from tests.engine.test_resume import continued; continued(sys.argv[1], 10)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for kind, (rows, states) in expected.items():
        assert {row["outcome"] for row in rows} == {"applied", "skipped"}
        for stop in STOPS:
            got = torch.load(tmp_path / f"from {stop}, {kind}", weights_only=True)
            assert torch.load(tmp_path / f"rows {stop}, {kind}") == repr(rows[stop:]), (kind, stop)
            for name in ("model", "optimizer", "scheduler", "manager"):
                assert same(got[name], states[name]), (kind, stop, name)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def test_random_state_on_request(tmp_path: Path) -> None:
    """Every generator, restored by loading, also for loops that do without groups."""
    import random

    manager = MixedPrecisionManager(precision="fp32")
    torch.manual_seed(4)
    random.seed(4)
    torch.save(manager.state_dict(random_state=True), tmp_path / "state")
    torch.save(manager.state_dict(), tmp_path / "without")
    expected = torch.randn(3), random.random()
    other = MixedPrecisionManager(precision="fp32")
    other.load_state_dict(torch.load(tmp_path / "without", weights_only=True))
    assert not torch.equal(torch.randn(3), expected[0])
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert torch.equal(torch.randn(3), expected[0])
    assert random.random() == expected[1]


def test_position_is_told_and_a_changed_loader_is_noticed() -> None:
    run = build("own generator")
    train(run, 6)
    assert run["manager"].report()["position"] == {"epoch": 1, "micro_batches": 6}
    state = run["manager"].state_dict()
    again = build("own generator")
    again["manager"].load_state_dict(state)
    short = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,))), batch_size=2)
    with pytest.raises(PolicyError, match="had used 6 micro-batches of this epoch, the loader gave only 4"):
        next(again["manager"].groups(short, 3))


def test_a_loader_that_the_user_restores() -> None:
    run = build("own generator")
    train(run, 6)
    again = build("own generator")
    again["manager"].load_state_dict(run["manager"].state_dict(), position=False)
    assert again["manager"].report()["counters"]["attempted"] == 6
    assert sum(1 for _ in again["loader"]) == 10
    assert len(train(again, 10)) == 4
    assert again["manager"].report()["position"]["epoch"] == 0


def test_a_loader_that_resumes_itself_is_left_alone() -> None:
    class Stateful:
        def __iter__(self) -> Any:
            return iter([torch.ones(1, 2)] * 3)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="fp32")
    for group in manager.groups(Stateful(), 1, weight=len):
        for x in group:
            manager.backward(model(x).mean())
        manager.step(model, optimizer)
        break
    other = MixedPrecisionManager(precision="fp32")
    other.load_state_dict(manager.state_dict())
    assert sum(1 for _ in iterate(other, Stateful(), model, optimizer)) == 3


def iterate(manager: MixedPrecisionManager, loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for group in manager.groups(loader, 1, weight=len):
        for x in group:
            manager.backward(model(x).mean())
        yield manager.step(model, optimizer)


def test_an_epoch_left_early_is_over() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="fp32")
    data = [torch.ones(1, 2)] * 5
    for _ in iterate(manager, data, model, optimizer):
        break
    assert manager.report()["position"] == {"epoch": 0, "micro_batches": 1}
    assert sum(1 for _ in iterate(manager, data, model, optimizer)) == 5
    assert manager.report()["position"] == {"epoch": 2, "micro_batches": 0}
