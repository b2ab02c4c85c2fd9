"""halfstep's own engine under the doctor: its scale, its skips and its schedules are seen, its results stay its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from halfstep import MisuseError, MixedPrecisionManager
from halfstep.engine.contribute import Contributor
from halfstep.engine.updater import Updater
from halfstep.events.audience import LISTENERS
from halfstep.launch import Enough
from halfstep.watch import Session


@pytest.fixture(params=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Late: the path of an accelerator, here on CPU tensors."""
    if request.param == "late":
        for kind in (Contributor, Updater):
            monkeypatch.setattr(kind, "host", property(lambda self: False, lambda self, value: None), raising=False)
    return bool(request.param == "late")


@pytest.fixture(autouse=True)
def nobody_listens_afterwards() -> Iterator[None]:
    yield
    assert LISTENERS == []


class Loop:
    """Ragged groups in FP16 from a scale that is far too high, so that the first updates are skipped."""

    def __init__(self, *, fused: bool = False, precision: str = "fp16", **policy: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if precision == "fp16":
            policy = {"init_scale": 2.0**20, **policy}
        self.manager = MixedPrecisionManager(precision=precision, device="cpu", **policy)
        sizes = (4, 6, 3, 7, 5, 2)
        self.batches = [(torch.randn(n, 5), torch.arange(n) % 3) for n in sizes]

    def loss(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x, y = batch or self.batches[0]
        with self.manager.context():
            return F.cross_entropy(self.model(x), y)

    def train(self, epochs: int = 4, weight: Any = None) -> None:
        for _ in range(epochs):
            for group in self.manager.groups(self.batches, 2, weight=weight):
                for batch in group:
                    self.manager.backward(self.loss(batch))
                self.manager.step(self.model, self.optimizer, self.scheduler)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def loud(session: Session) -> list[tuple[str, str]]:
    return [(f.rule, f.message) for f in session.findings if f.severity != "info" or f.rule == "halfstep-internal"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("weight", [None, lambda batch: len(batch[1])], ids=["read", "ahead"])
def test_updates_outcomes_and_the_path_of_the_scale_are_the_engines_own(fused: bool, weight: Any, late: bool) -> None:
    with Session() as session:
        loop = Loop(fused=fused)
        loop.train(weight=weight)
    counters = loop.manager.report()["counters"]
    summary = session.summary
    assert counters["skipped"] >= 2
    seen = (summary.attempted, summary.applied, summary.skipped, summary.micro_batches)
    assert seen == tuple(counters[name] for name in ("attempted", "applied", "skipped", "micro_batches"))
    assert [scale for _, scale in summary.scale_path] == [entry["scale"] for entry in loop.manager.scale_history]
    assert summary.weighed == summary.micro_batches
    assert session.findings == ()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_was_skipped_or_empty_without_a_scale_is_seen_too(precision: str) -> None:
    with Session() as session:
        loop = Loop(precision=precision)
        loop.manager.backward(loop.loss() * float("inf"))
        loop.manager.step(loop.model, loop.optimizer)
        loop.manager.backward(loop.loss(), weight=0)
        loop.manager.step(loop.model, loop.optimizer)
        loop.manager.backward(loop.loss(), weight=4)
        loop.manager.step(loop.model, loop.optimizer)
    summary = session.summary
    assert (summary.attempted, summary.applied, summary.skipped, summary.empty) == (3, 1, 1, 1)
    assert summary.scale_path == []


@pytest.mark.parametrize("fused", [True, False])
def test_results_under_the_doctor_are_those_without_it(fused: bool, late: bool) -> None:
    plain = Loop(fused=fused)
    plain.train()
    with Session() as session:
        watched = Loop(fused=fused)
        watched.train()
    assert all(torch.equal(a, b) for a, b in zip(plain.weights(), watched.weights(), strict=True))
    assert plain.manager.scale_history == watched.manager.scale_history
    assert plain.scheduler.state_dict() == watched.scheduler.state_dict()
    assert not loud(session)


def test_clipping_by_hand_is_named_with_the_scale_that_the_gradients_carry() -> None:
    with Session() as session:
        loop = Loop(init_scale=2.0**12)
        loop.manager.backward(loop.loss())
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        with pytest.raises(MisuseError, match="loss scale 4096"):
            loop.manager.step(loop.model, loop.optimizer)
        loop.manager.discard()
        loop.train(1)
    (finding,) = [f for f in session.findings if f.severity != "info"]
    assert finding.rule == "clip-scaled-gradients"
    assert finding.evidence["scale"] == 4096.0
    assert "would have received" in finding.message
    assert "MixedPrecisionManager(max_norm=1)" in finding.fix
    assert finding.at is not None
    assert Path(finding.at.file).name == Path(__file__).name


def test_two_optimizers_one_scale_and_a_scale_set_by_hand(late: bool) -> None:
    with Session() as session:
        loop, other = Loop(), Loop()
        for _ in range(6):
            loop.manager.backward(loop.loss(), inputs=loop.model)
            loop.manager.backward(other.loss(), inputs=other.model)
            loop.manager.step(loop.model, loop.optimizer)
            loop.manager.step(other.model, other.optimizer)
        loop.manager.loss_scale = 64.0
        loop.manager.backward(loop.loss(), inputs=loop.model)
        loop.manager.step(loop.model, loop.optimizer)
    assert [scale for _, scale in session.summary.scale_path] == [e["scale"] for e in loop.manager.scale_history]
    assert session.summary.skipped == loop.manager.report()["counters"]["skipped"]
    assert not loud(session)


@pytest.mark.parametrize("unit", ["applied", "attempted"])
def test_a_schedule_moves_in_the_unit_that_was_declared(unit: str) -> None:
    with Session() as session:
        loop = Loop(scheduler_unit=unit)
        loop.train(2)
    assert loop.manager.report()["counters"]["skipped"] > 2
    assert not loud(session)


def test_a_run_is_ended_after_so_many_applied_updates_of_the_engine() -> None:
    loop = Loop()
    with pytest.raises(Enough), Session(limit=3):
        loop.train()
    counters = loop.manager.report()["counters"]
    assert counters["applied"] == 3
    assert counters["skipped"] >= 2
    loop.train(1)  # its books are closed: it goes on as if nothing had been


def test_an_update_that_was_refused_leaves_the_watch_in_order() -> None:
    with Session() as session:
        loop = Loop(on_nonfinite="raise", init_scale=64.0)
        loop.train(1)
        loop.manager.backward(loop.loss() * float("inf"))
        with pytest.raises(ArithmeticError, match="not finite"):
            loop.manager.step(loop.model, loop.optimizer)
        loop.manager.discard()
        loop.train(1)
    assert session.summary.applied == 6
    assert session.summary.attempted == 6
    assert not [f for f in session.findings if f.rule == "halfstep-internal"]


@pytest.mark.parametrize("same", [True, False], ids=["same optimizer", "all new"])
def test_a_run_that_is_resumed_has_its_scale_restored(same: bool, tmp_path: Path) -> None:
    with Session() as session:
        first = Loop()
        first.train(3)
        parts = ("model", "optimizer", "scheduler", "manager")
        torch.save({part: getattr(first, part).state_dict() for part in parts}, tmp_path / "run.pt")
        second = Loop(init_scale=2.0**10)
        if same:
            second.model, second.optimizer, second.scheduler = first.model, first.optimizer, first.scheduler
        saved = torch.load(tmp_path / "run.pt", weights_only=False)
        for part in parts:
            getattr(second, part).load_state_dict(saved[part])
        second.train(3)
    assert second.manager.report()["counters"]["skipped"] == first.manager.report()["counters"]["skipped"]
    assert not loud(session)


def test_a_manager_made_anew_over_the_same_optimizer_loses_its_scale() -> None:
    with Session() as session:
        first = Loop()
        first.train(3)
        second = Loop()
        second.model, second.optimizer, second.scheduler = first.model, first.optimizer, first.scheduler
        second.train(3)
    assert [rule for rule, _ in loud(session)] == ["scaler-recreated"]


def flat(manager: MixedPrecisionManager | None, sizes: tuple[int, ...], divisor: float, weigh: bool = False) -> Session:
    """Groups of four in a flat loop, by the manager or by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    batches = [(torch.randn(n, 5), torch.arange(n) % 3) for n in sizes * 6]
    with Session() as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number, (x, y) in enumerate(batches, 1):
            with nullcontext() if manager is None else manager.context():
                loss = F.cross_entropy(model(x), y) / divisor
            if manager is None:
                loss.backward()
            elif weigh:
                manager.backward(loss, weight=len(y))
            else:
                manager.backward(loss)
            if number % 4 == 0:
                if manager is not None:
                    manager.step(model, optimizer)
                else:
                    optimizer.step()
                    optimizer.zero_grad()
    return session


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("sizes", "divisor", "rule"),
    [((2, 9, 4, 3), 4.0, "mean-of-means"), ((3, 3, 3, 3), 1.0, "loss-not-divided"), ((3, 3, 3, 3), 4.0, None)],
)
def test_a_flat_loop_without_weights_is_judged_as_one_by_hand(
    precision: str, sizes: tuple[int, ...], divisor: float, rule: str | None
) -> None:
    """Clipped by the manager all along: what it multiplies by is no denominator."""
    plain = flat(None, sizes, divisor)
    managed = flat(MixedPrecisionManager(precision=precision, device="cpu", max_norm=0.05), sizes, divisor)
    found = [(f.rule, f.severity, f.count, f.message) for f in plain.findings]
    assert [(f.rule, f.severity, f.count, f.message) for f in managed.findings] == found
    assert [name for name, *_ in found] == [rule] * (rule is not None)


@pytest.mark.parametrize("sizes", [(2, 9, 4, 3), (3, 3, 3, 3)])
def test_a_flat_loop_with_weights_is_right(sizes: tuple[int, ...]) -> None:
    assert flat(MixedPrecisionManager(precision="bf16", device="cpu"), sizes, 1.0, weigh=True).findings == ()


def test_zeros_that_enter_at_an_edge_of_a_graph_are_no_fault_of_the_watch() -> None:
    """As a replica sends them that has nothing left to contribute."""
    with Session() as session:
        loop = Loop(precision="fp32")
        edge = torch.autograd.graph.get_gradient_edge(loop.loss())
        torch.autograd.backward([edge], [torch.zeros(())])
        loop.optimizer.zero_grad()
        loop.train(1)
    assert not loud(session)


@pytest.mark.parametrize(("precision", "sizes"), [("fp32", (4, 2)), ("fp32", (4, 4)), ("fp16", (4, 4))])
def test_an_update_by_hand_of_what_the_manager_has_still_to_divide(precision: str, sizes: tuple[int, ...]) -> None:
    with Session() as session:
        loop = Loop(precision=precision, init_scale=2.0**10)
        for size in sizes:
            loop.manager.backward(loop.loss((torch.randn(size, 5), torch.arange(size) % 3)), weight=size)
        loop.optimizer.step()
        loop.manager.discard()
        loop.train(1)
    (finding,) = [f for f in session.findings if f.severity != "info"]
    assert finding.rule == "optimizer-step-bypasses-scaler"
    assert "manager.step(model, optimizer)" in finding.fix
    if precision == "fp32":
        assert finding.evidence["undivided"] == pytest.approx(sum(sizes) / sizes[0])


class Inside(torch.optim.SGD):
    """Steps another optimizer of the same parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.01)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_that_the_managers_own_steps_inside_is_the_managers_too() -> None:
    with Session() as session:
        loop = Loop(precision="fp16", init_scale=2.0**10)
        loop.optimizer = Inside(loop.model.parameters())
        loop.scheduler = None
        for _ in range(3):
            for batch in loop.batches[:2]:
                loop.manager.backward(loop.loss(batch), weight=len(batch[1]))
            loop.manager.step(loop.model, loop.optimizer)
    assert not loud(session)


def test_two_optimizers_take_turns_at_the_same_parameters() -> None:
    with Session() as session:
        loop = Loop(precision="fp32")
        other = torch.optim.SGD(loop.model.parameters(), lr=0.01)
        for number in range(8):
            loss = loop.loss()
            loop.manager.backward(loss)
            loop.manager.step(loop.model, other if number % 2 else loop.optimizer)
            loss.item()
    assert session.findings == ()
    assert (session.summary.attempted, session.summary.micro_batches) == (8, 8)
