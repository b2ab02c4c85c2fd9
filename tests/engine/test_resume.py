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


def placed(m: int, size: int) -> dict[str, Any]:
    """A run whose loader can be split differently: 20 examples in an order of their own generator."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.arange(80.0).view(20, 4) / 80, torch.arange(20) % 3)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
        "manager": MixedPrecisionManager(precision="fp32"),
        "loader": DataLoader(data, m, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "size": size,
    }


def seen(run: dict[str, Any], updates: int) -> list[list[float]]:
    """The first feature of every example of the next updates."""
    found: list[list[float]] = []
    while len(found) < updates:
        for group in run["manager"].groups(run["loader"], run["size"]):
            found.append([])
            for x, y in group:
                found[-1] += x[:, 0].tolist()
                run["manager"].backward(F.cross_entropy(run["model"](x), y))
            run["manager"].step(run["model"], run["optimizer"])
            if len(found) == updates:
                break
    return found


@pytest.mark.parametrize(("m", "size"), [(1, 6), (3, 2), (6, 1)])
@pytest.mark.parametrize("stop", [2, 4, 5])
def test_another_split_goes_on_with_the_same_examples(m: int, size: int, stop: int) -> None:
    """6 examples an update, the last of an epoch 2: mid-epoch, at its end, and in the next one."""
    whole = placed(2, 3)
    expected = seen(whole, 9)
    first = placed(2, 3)
    seen(first, stop)
    again = placed(m, size)
    for name in ("model", "optimizer", "manager"):
        again[name].load_state_dict(first[name].state_dict())
    assert seen(again, 9 - stop) == expected[stop:]
    for p, q in zip(whole["model"].parameters(), again["model"].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_a_split_that_cannot_reach_the_place_is_refused() -> None:
    run = placed(2, 3)
    seen(run, 1)
    state = run["manager"].state_dict()
    for m, size, words in [(4, 2, "reach 8, not 6"), (3, 3, "6 examples, those the loader gives now have 9")]:
        again = placed(m, size)
        again["manager"].load_state_dict(state)
        with pytest.raises(PolicyError, match=words):
            next(again["manager"].groups(again["loader"], size))


def test_the_epoch_is_told_before_it_begins() -> None:
    run = placed(2, 3)
    manager, loader = run["manager"], run["loader"]
    assert manager.groups(loader, 3).epoch == 0
    seen(run, 5)
    assert manager.groups(loader, 3).epoch == 2  # the second pass was left early: a new one is a new epoch
    again = placed(2, 3)
    again["manager"].load_state_dict(manager.state_dict())
    groups = again["manager"].groups(loader, 3)
    assert groups.epoch == 1  # a resumed one goes on
    next(groups)
    assert groups.epoch == 1


def test_the_state_has_the_same_leaves_at_any_time() -> None:
    """What is loaded into a template (torch.distributed.checkpoint) finds every key of what was saved."""

    def leaves(state: Any, path: str = "") -> set[str]:
        if isinstance(state, dict):
            return {leaf for key, value in state.items() for leaf in leaves(value, f"{path}.{key}")}
        assert not (isinstance(state, list) and any(isinstance(item, (dict, list, torch.Tensor)) for item in state))
        return {path}

    run = build("own generator")
    before = leaves(run["manager"].state_dict(random_state=True))
    train(run, 6)
    assert leaves(run["manager"].state_dict(random_state=True)) == before


def test_random_numbers_of_another_rank_are_not_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    state = MixedPrecisionManager(precision="fp32").state_dict(random_state=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    manager = MixedPrecisionManager(precision="fp32")
    manager.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    (note,) = manager.report()["notes"]
    assert "saved by rank 0 and loaded on rank 1" in note["message"]


def test_states_of_version_1_go_on() -> None:
    """They had bare generators, and neither sizes nor examples nor a rank."""
    whole = build("own generator")
    rows = train(whole, 8)
    run = build("own generator")
    train(run, 6)
    state = run["manager"].state_dict()
    position = {key: state["position"][key] for key in ("epoch", "micro_batches", "exhausted")}
    position |= {key: state["position"][key][0] for key in ("start", "now")}
    old = state | {"version": 1, "position": position, "scale_history": list(state["scale_history"])}
    del old["rank"]
    again = build("own generator")
    for name in ("model", "optimizer", "scheduler"):
        again[name].load_state_dict(run[name].state_dict())
    again["manager"].load_state_dict(old)
    torch.set_rng_state(position["now"]["torch"])
    assert repr(train(again, 8)) == repr(rows[6:])
