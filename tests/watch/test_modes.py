"""What the sights of the modes family measure, against what is known beforehand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.events import AutocastEntered, BackwardDowncast, Event, Recomputed, StaleCasts
from halfstep.watch import Session
from halfstep.watch.recomputations import First


def seen(work: Callable[[], Any], *, looks: bool = True) -> list[Event]:
    """The events of a piece of work."""
    session, events = Session(), []
    release = session.stream._release

    def note(event: Event) -> None:
        events.append(event)
        release(event)

    session.stream._release = note
    with session:
        if not looks:
            session.look.forbid("a test without looks")
        work()
    assert [f.message for f in session.findings if f.rule == "halfstep-internal"] == []
    return events


def only(events: list[Event], kind: type[Any]) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


# -- recomputations --------------------------------------------------------------------------------------------------


class Again(torch.autograd.Function):
    """Checkpointing by hand."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run, ctx.x = run, x.detach()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        out.backward(grad)
        return None, x.grad


class Scaling(nn.Module):
    """Multiplies by another number at each call."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = iter(factors)
        self.inside = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) * next(self.factors)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "Again"])
def test_the_difference_of_a_recomputation(how: str, looks: bool) -> None:
    def work() -> None:
        module = Scaling([1.0, 1.5])
        x = torch.randn(6, 4, requires_grad=True)
        out = Again.apply(module, x) if how == "Again" else checkpoint(module, x, use_reentrant=how == "reentrant")
        (out.tanh() if how != "checkpoint" else out).sum().backward()

    (event,) = only(seen(work, looks=looks), Recomputed)
    assert event.by == how
    if how == "checkpoint":  # what is saved is compared: x and the weight are the same, the factor is no tensor
        assert event.difference is None
        assert event.tensors == 0
    else:
        assert event.difference == pytest.approx(0.5 / 1.5, rel=1e-5)
        assert event.tensors == 1
    assert event.drew == ()


@pytest.mark.parametrize("keep", [True, False])
def test_dropout_in_a_checkpoint(keep: bool) -> None:
    def work() -> None:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
        x = torch.randn(32, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(block, x, use_reentrant=False, preserve_rng_state=keep)
        out.float().sum().backward()

    (event,) = only(seen(work), Recomputed)
    assert event.drew == ("default",)
    assert event.preserves is keep
    assert event.autocast == event.again_autocast == "bfloat16"
    assert event.again_dtype == ""
    if keep:
        assert event.difference == 0.0, "running statistics move in the recomputation, which is no difference of it"
    else:
        assert event.difference > 0.5


def test_which_contributions_are_compared_and_what_is_kept() -> None:
    def work() -> None:
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        for _ in range(17):
            checkpoint(block, torch.randn(3, 4), use_reentrant=False).sum().backward()
        gc.collect()
        assert not [o for o in gc.get_objects() if type(o) is First], "samples live no longer than their graph"

    compared = [e.micro for e in only(seen(work), Recomputed)]
    assert compared == [1, 2, 3, 4, 8, 16]


def test_a_recomputation_without_autocast() -> None:
    def work() -> None:
        block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        x = torch.randn(6, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = Again.apply(block, x)
        out.float().sum().backward()

    (event,) = only(seen(work), Recomputed)
    assert (event.autocast, event.again_autocast) == ("bfloat16", "off")
    assert (event.dtype, event.again_dtype) == ("bfloat16", "float32")
    assert event.at is not None
    assert event.at.function == "Again.backward"


# -- regions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("looks", [True, False])
def test_copies_are_stale_when_their_weights_changed(rate: float, looks: bool) -> None:
    def work() -> None:
        net = nn.Linear(4, 1)
        opt = torch.optim.SGD(net.parameters(), lr=rate)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                opt.zero_grad()
                net(torch.randn(6, 4)).sum().backward()
                opt.step()

    events = only(seen(work, looks=looks), StaleCasts)
    assert {e.changed for e in events} == {rate > 0}
    assert max(e.backwards for e in events) == 3


def test_a_downcast_backward_is_a_real_one() -> None:
    """Where it is told, the gradient of the FP32 head is off by bfloat16's rounding; outside the region it is not."""
    torch.manual_seed(0)
    body, head = nn.Linear(8, 16), nn.Linear(16, 1)
    x = torch.randn(64, 8)

    def gradient(inside: bool) -> torch.Tensor:
        head.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = body(x).detach()
            with torch.autocast("cpu", enabled=False):
                loss = head(h.float()).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert head.weight.grad is not None
        return head.weight.grad.double()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = body(x).detach().double()
        weight, bias = head.weight.detach().double(), head.bias.detach().double()
    exact = (2 / 64) * (h @ weight.t() + bias).t() @ h

    def error(inside: bool) -> float:
        return float((gradient(inside) - exact).norm() / exact.norm())

    events = only(seen(lambda: gradient(True)), BackwardDowncast)
    assert [(e.dtype, e.operators) for e in events] == [("bfloat16", 1)]  # h needs no gradient: one product
    assert only(seen(lambda: gradient(False)), BackwardDowncast) == []
    assert error(True) > 1e-4
    assert error(False) < 1e-6


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated() -> None:
    pass


def test_where_a_region_stands() -> None:
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    made_here = torch.autocast("cpu", dtype=torch.float16)

    def work() -> None:
        later = torch.autocast("cpu", dtype=torch.bfloat16)
        with later:
            pass
        with context, made_here:
            decorated()

    first, second, third, fourth = only(seen(work), AutocastEntered)
    assert first.made_at.line + 1 == first.at.line
    assert second.made_at is None, "made before the watch began"
    assert (second.depth, third.depth, fourth.depth) == (1, 2, 3)
    assert third.dtype == "float16"
    assert fourth.at.line == decorated.__wrapped__.__code__.co_firstlineno
