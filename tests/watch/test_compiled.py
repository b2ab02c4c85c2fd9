"""A compiled script computes the same bits watched as unwatched, from the same graphs, and nothing compiles twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.watch import Session
from halfstep.watch.compiled import compiled_already

BACKEND = "aot_eager"
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.drop = nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(nn.functional.gelu(self.inside(x)))


class Net(nn.Module):
    def __init__(self, saves: bool = False) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(8, 16), Block(), nn.Linear(16, 4)
        self.saves = saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Half.apply(self.enter(x).relu())
        h = checkpoint(self.block, h, use_reentrant=False) if self.saves else self.block(h)
        return self.leave(h)


def whole_model(net: Net) -> Callable[..., Any]:
    return torch.compile(net, backend=BACKEND)


def decorated(net: Net) -> Callable[..., Any]:
    @torch.compile(backend=BACKEND)
    def forward(x: torch.Tensor) -> Any:
        return net(x)

    return forward


def in_place(net: Net) -> Callable[..., Any]:
    net.compile(backend=BACKEND)
    return net


def regional(net: Net) -> Callable[..., Any]:
    net.block.compile(backend=BACKEND)
    return net


class Ran(NamedTuple):
    bits: list[torch.Tensor]
    graphs: int
    captured: int
    breaks: int
    recompiled: int


def loop(net: Net, forward: Callable[..., Any], whole: bool = False) -> Ran:
    torch.manual_seed(1)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.detach()

    run: Step = torch.compile(step, backend=BACKEND) if whole else step
    losses = []
    for _ in range(4):
        x = torch.randn(16, 8)
        losses.append(run(x, x[:, :4].argmax(1)))
    stats = counters["stats"]
    ran = Ran(
        [*losses, *(p.detach().clone() for p in net.parameters()), torch.get_rng_state()],
        stats["unique_graphs"],
        stats["calls_captured"],
        sum(counters["graph_break"].values()),
        len(torch._dynamo.utils.guard_failures),
    )
    counters.clear()
    torch._dynamo.reset()
    return ran


def made(saves: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(saves)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("saves", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("compiled", [whole_model, decorated, in_place, regional])
def test_compiled_models(compiled: Callable[[Net], Callable[..., Any]], saves: bool) -> None:
    net = made(saves)
    plain = loop(net, compiled(net))
    with halfstep.watch() as session:
        net = made(saves)
        watched = loop(net, compiled(net))
    assert plain.graphs == 1
    assert same(plain.bits, watched.bits)
    assert plain[1:] == watched[1:]
    assert session.summary.applied == 4
    assert session.findings == ()
    assert session.look.forbidden is not None


def test_compiled_before_the_watch() -> None:
    """As in a notebook: the cell that compiles was run long ago."""
    net = made()
    plain = loop(net, whole_model(net))
    net = made()
    forward = whole_model(net)
    assert compiled_already()
    with halfstep.watch() as session:
        watched = loop(net, forward)
    assert same(plain.bits, watched.bits)
    assert plain[1:] == watched[1:]
    assert session.look.spent == 0
    assert session.findings == ()


def test_what_is_gone_does_not_forbid_looks() -> None:
    net = made()
    whole_model(net)(torch.randn(2, 8))
    del net
    assert not compiled_already()


def test_a_compiled_update() -> None:
    """Forward, backward and update in one function: watching costs a graph break or two, and no graph."""
    net = made()
    plain = loop(net, net, whole=True)
    with halfstep.watch() as session:
        net = made()
        watched = loop(net, net, whole=True)
    assert same(plain.bits, watched.bits)
    assert watched.graphs <= plain.graphs
    assert watched.captured <= plain.captured
    assert watched.breaks <= plain.breaks + 3
    assert watched.recompiled == plain.recompiled
    assert session.summary.applied == 4
    assert session.findings == ()


def test_compile_that_is_switched_off_keeps_its_look() -> None:
    session = Session()
    with session:
        net = made()
        torch.compile(net, disable=True)(torch.randn(2, 8))
        assert session.look.forbidden is None
        assert session.look.is_open
