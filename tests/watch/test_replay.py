"""A call made again gives what it gave, in either precision, and leaves no trace; late culprits are found by it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.events import Event, NonFinite, StatisticsPoisoned
from halfstep.watch import Session
from halfstep.watch.calls import Calls
from halfstep.watch.replay import replay

LATE = 20  # a micro-batch beyond those that are looked at


class Net(nn.Module):
    """Draws random numbers, keeps statistics, remembers its last output and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.last = nn.Linear(8, 2)
        self.calls = 0
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, *, y: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.first(x)).relu()) + random.random() * 0
        self.seen = self.last(h * h)
        return self.seen if y is None else nn.functional.cross_entropy(self.seen.float(), y)


def quiet() -> Session:
    """A session that looks at updates 2^k only."""
    session = Session()
    session.look.spent = 10**9
    return session


def train(session: Session | None, bad: Callable[[int, torch.Tensor], torch.Tensor], returns_loss: bool) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    net = Net()
    hooked: list[int] = []
    net.last.register_forward_hook(lambda *_: hooked.append(1))
    net.first.weight.register_hook(lambda _: hooked.append(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def work() -> None:
        for i in range(2 * LATE):
            x, y = bad(i, torch.randn(4, 6)), torch.randint(0, 2, (4,))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(x, y=y) if returns_loss else nn.functional.cross_entropy(net(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    if session is None:
        work()
    else:
        with session:
            work()
    return [
        *net.state_dict().values(),
        torch.rand(3),
        torch.tensor([random.random(), net.calls, *hooked, scaler.get_scale()]),
    ]


def events_of(session: Session) -> list[Event]:
    events: list[Event] = []
    see = session.judge.see

    def note(event: Event) -> None:
        events.append(event)
        see(event)

    session.judge.see = note  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("returns_loss", [True, False])
def test_a_late_culprit_is_found_and_nothing_is_changed(returns_loss: bool) -> None:
    def bad(i: int, x: torch.Tensor) -> torch.Tensor:
        if i == LATE + 1:
            x = x * 1e6
        if i == LATE + 6:
            x[2, 3] = torch.nan
        return x

    session = quiet()
    events = events_of(session)
    watched, plain = train(session, bad, returns_loss), train(None, bad, returns_loss)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(watched, plain, strict=True))
    found = [e for e in events if isinstance(e, NonFinite)]
    assert [(e.micro, e.operator, e.cause) for e in found] == [
        (LATE + 2, "_to_copy", "operator"),
        (LATE + 7, "input", "input"),
    ]
    assert found[0].module is not None
    assert found[0].module.endswith("first")
    assert found[0].at is not None
    assert not [f.message for f in session.findings if f.rule == "halfstep-internal"]
    assert [e.module for e in events if isinstance(e, StatisticsPoisoned)] == ["net.norm"]


def test_a_late_gradient_is_found_once_what_arrives_is_kept() -> None:
    class Length(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(5, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x).square().sum(-1).sqrt()

    net = Length()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    session = quiet()
    events = events_of(session)
    with session:
        for i in range(LATE + 4):
            x = torch.randn(4, 5)
            if i >= LATE:
                x[1] = 0.0
            optimizer.zero_grad()
            scaler.scale((net(x) - 1).abs().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    found = [e for e in events if isinstance(e, NonFinite)]
    assert found
    assert {(e.phase, e.node) for e in found} == {("backward", "SqrtBackward0")}
    assert found[0].micro == LATE + 2  # the second time


def one_call(net: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[Session, Calls, Any]:
    session = quiet().start()
    calls = next(s for s in session.sights if isinstance(s, Calls))
    session.look.close()
    calls.arm()
    result = net(*args, **kwargs)
    return session, calls, result


def test_a_replay_is_the_call_again() -> None:
    torch.manual_seed(1)
    random.seed(1)
    net = Net()
    x, y = torch.randn(4, 6), torch.randint(0, 2, (4,))
    session, calls, loss = one_call(net, x, y=y)
    try:
        (call,) = calls.recent()
        loss.backward()
        before = copy.deepcopy([*net.state_dict().values(), *(p.grad for p in net.parameters())])
        state, remembered = torch.get_rng_state(), net.seen
        again = replay(session, call)
        assert again is not None
        assert torch.equal(again.outputs[0], loss)
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(again.gradients[name], parameter.grad), name
        after = [*net.state_dict().values(), *(p.grad for p in net.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert torch.equal(state, torch.get_rng_state())
        assert net.seen is remembered
        assert net.calls == 1
        x.add_(1.0)
        assert replay(session, call) is None  # its input is not what it was
    finally:
        session.finish()


def test_a_replay_in_float32_is_the_float32_model() -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    half = copy.deepcopy(net).bfloat16()
    x = torch.randn(4, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        session, calls, out = one_call(half, x)
    try:
        (call,) = calls.recent()
        arriving = torch.randn_like(out)
        out.backward(arriving)
        again = replay(session, call, full=True)
        assert again is not None
        wide = copy.deepcopy(half).float()
        exact = wide(x.float())
        exact.backward(arriving.float())
        assert torch.equal(again.outputs[0], exact)
        assert again.outputs[0].dtype is torch.float32
        for name, parameter in wide.named_parameters():
            assert torch.equal(again.gradients[name], parameter.grad), name
        assert all(p.dtype is torch.bfloat16 for p in half.parameters())
    finally:
        session.finish()


def test_calls_keep_references_without_graphs_and_not_too_many() -> None:
    net = nn.Linear(1 << 10, 1)
    session = quiet().start()
    session.look.close()
    calls = next(s for s in session.sights if isinstance(s, Calls))
    try:
        source = torch.ones(4, 1 << 10, requires_grad=True)
        fed = source * 2
        net(fed)
        (call,) = calls.recent()
        inputs = call.inputs()
        assert inputs is not None
        assert inputs[0][0].data_ptr() == fed.data_ptr()
        assert inputs[0][0].grad_fn is None
        assert inputs[0][0].requires_grad
        for _ in range(40):
            net(torch.ones(1 << 12, 1 << 10))  # 16 MiB each
        kept = list(calls.recent())
        assert 1 <= len(kept) <= 16
        assert sum(c.size for c in kept) <= 64 << 20
        with torch.no_grad():
            net(fed)
        assert list(calls.recent()) == kept
    finally:
        session.finish()
