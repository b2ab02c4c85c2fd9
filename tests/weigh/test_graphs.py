"""What cannot be weighed is said; what runs in the user's backward is left as it was."""

from __future__ import annotations

import gc
import math
import multiprocessing
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep.weigh import weigh

from .reference import one, weighed

torch.manual_seed(7)
X = torch.randn(8, 6)
Y = torch.tensor([0, 1, -100, 2, 3, -100, 1, 0])
VALUES = torch.randn(8, 4)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.pow(3).mean()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x / x.numel()


def test_opaque_losses_are_named() -> None:
    out = model()(X)
    for loss, reason in [
        (Cube.apply(out), "CubeBackward"),
        (F.mse_loss(out, VALUES).sqrt(), "SqrtBackward0"),
        (F.mse_loss(out, VALUES) * out.mean(), "MulBackward0"),
        (checkpoint(lambda o: F.mse_loss(o, VALUES), out, use_reentrant=True), "CheckpointFunctionBackward"),
        ((2 * (out * VALUES).sum() + 1) / (out.sum() + VALUES.sum() + 1), "DivBackward0"),
    ]:
        weighing = weigh(loss * 2)
        assert weighing.opaque == reason
        loss.backward(retain_graph=True)
        assert weighing.read() == ()


def test_what_can_be_weighed_beside_it_is() -> None:
    out = model()(X)
    weighing, terms = weighed(0.5 * F.mse_loss(out, VALUES) + Cube.apply(out))
    assert weighing.opaque == "CubeBackward"
    assert [(t.loss, t.total) for t in terms] == [("mse", 0.5)]


def test_no_graph() -> None:
    for tensor in (torch.zeros(()), nn.Parameter(torch.zeros(()))):
        weighing = weigh(tensor)
        assert weighing.opaque == "no grad_fn"
        assert weighing.read() == ()
        weighing.remove()


def test_a_compiled_loss_is_opaque() -> None:
    compiled = torch.compile(lambda o: F.mse_loss(o, VALUES), backend="aot_eager")
    weighing, terms = weighed(compiled(model()(X)) / 2)
    assert weighing.opaque == "CompiledFunctionBackward"
    assert terms == ()


def test_a_compiled_model_under_an_eager_loss_is_weighed() -> None:
    compiled = torch.compile(model(), backend="aot_eager")
    assert one(F.cross_entropy(compiled(X), Y) / 2).total == 0.5


def test_compiled_autograd() -> None:
    """In a new process: torch keeps such a compiler for good, and a fork of this one, which has compiled, can hang."""
    child = multiprocessing.get_context("spawn").Process(target=_compile_backward)
    child.start()
    child.join()
    assert child.exitcode == 0


def _compile_backward() -> None:
    from torch._dynamo import compiled_autograd

    net = model()
    loss = F.cross_entropy(net(X), Y) / 4
    weighing = weigh(loss)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    weighing.remove()
    (term,) = weighing.read()
    assert (term.total, term.supervised) == (0.25, 6)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_outputs_of_a_parallel_model() -> None:
    for unused in (False, True):  # True puts a node of its own on every output
        net = nn.parallel.DistributedDataParallel(model(), find_unused_parameters=unused)
        assert one(net(X).mean()).total == pytest.approx(1)
        assert one(F.cross_entropy(net(X), Y)).supervised == 6


class WithLoss(nn.Module):
    """A model that returns its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net(x)
        return F.mse_loss(out, VALUES), F.cross_entropy(out, Y)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("unused", [True, False])
def test_losses_that_a_parallel_model_returns(unused: bool) -> None:
    net = nn.parallel.DistributedDataParallel(WithLoss(), find_unused_parameters=unused)
    first, second = net(X)
    if unused:
        assert type(first.grad_fn).__name__ == "_DDPSinkBackward"
    weighing, terms = weighed(first + second / 2)
    assert weighing.opaque is None
    assert [(t.loss, t.total) for t in terms] == [("mse", 1.0), ("cross_entropy", 0.5)]


@pytest.mark.usefixtures("alone")
def test_a_distributed_loss_is_left_alone() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    out = distribute_tensor(VALUES.clone().requires_grad_(), init_device_mesh("cpu", (1,)), [Replicate()])
    weighing, terms = weighed(F.mse_loss(out, torch.zeros_like(out)))
    assert weighing.opaque == "DTensor loss"
    assert terms == ()


def test_budget() -> None:
    out = model()(X)
    losses = [F.mse_loss(out, VALUES * k) for k in range(1, 60)]
    assert weighed(sum(losses))[0].opaque == "budget of 64 nodes"
    weighing, terms = weighed(sum(F.mse_loss(model()(X), VALUES) for _ in range(60)), budget=200)
    assert weighing.opaque is None
    assert len(terms) == 60


def test_saved_tensors_behind_hooks_are_not_touched() -> None:
    """Reading them would recompute a checkpointed region (a BatchNorm would count its batch again)."""
    unpacked: list[int] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(1)
        return tensor

    out = model()(X)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        losses = [
            F.cross_entropy(out, Y),
            F.cross_entropy(out, Y, weight=torch.ones(4)),
            F.cross_entropy(out, Y, reduction="none").mean(),
            (F.cross_entropy(out, Y, reduction="none") * (Y != -100)).sum() / 6,
            F.binary_cross_entropy_with_logits(out, VALUES.sigmoid(), weight=VALUES.abs()),
            F.cross_entropy(out, Y, label_smoothing=0.1),
            F.multi_margin_loss(out, Y.clamp(min=0), weight=torch.ones(4)),
        ]
    for loss in losses:
        unpacked.clear()
        weighing = weigh(loss)
        assert unpacked == []
        loss.backward(retain_graph=True)
        seen = len(unpacked)
        weighing.remove()
        (term,) = weighing.read()
        assert len(unpacked) == seen
        assert term.total == pytest.approx(1)
        if term.loss != "multi_margin":
            assert term.supervised is None
            assert math.isnan(term.coefficient)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models_see_every_batch_once(reentrant: bool) -> None:
    net = model()
    x = X.clone().requires_grad_()
    loss = F.cross_entropy(checkpoint(net, x, use_reentrant=reentrant), Y)
    term = one(loss)
    assert (term.total, term.supervised) == (1.0, 6)
    assert int(net[1].num_batches_tracked) == 2  # the forward and torch's own recomputation


def test_a_loss_inside_a_checkpoint_runs_once_more_and_no_more() -> None:
    net = model()
    x = X.clone().requires_grad_()
    loss = checkpoint(lambda inner: F.cross_entropy(net(inner), Y), x, use_reentrant=False)
    term = one(loss / 2)
    assert (term.total, term.supervised) == (0.5, None)
    assert int(net[1].num_batches_tracked) == 2


LOSSES = {
    "mean": lambda out: F.cross_entropy(out, Y) / 4,
    "masked": lambda out: (F.cross_entropy(out, Y, reduction="none") * (Y != -100)).sum() / 6,
    "smoothed": lambda out: F.cross_entropy(out, Y, label_smoothing=0.1, weight=torch.rand(4)),
    "soft": lambda out: F.cross_entropy(out, VALUES.softmax(-1)),
    "hand": lambda out: ((out - VALUES).pow(2).sum(-1) * (Y != -100)).sum() / 6 + out.norm(dim=1).mean(),
    "bce": lambda out: F.binary_cross_entropy_with_logits(out, VALUES.sigmoid(), weight=VALUES.abs()) * 65536,
    "opaque": lambda out: Cube.apply(out) + F.mse_loss(out, VALUES).sqrt(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_bit_identical(name: str) -> None:
    gradients = []
    for watched in (False, True):
        net = model()
        torch.manual_seed(2)
        loss = LOSSES[name](net(X))
        weighing = weigh(loss) if watched else None
        loss.backward()
        if weighing is not None:
            weighing.remove()
            weighing.read()
        gradients.append([p.grad for p in net.parameters()])
    for plain, weighed_too in zip(*gradients, strict=True):
        assert torch.equal(plain, weighed_too)


def test_second_derivatives_are_bit_identical() -> None:
    results = []
    for watched in (False, True):
        net = model()
        x = X.clone().requires_grad_()
        inner = (F.cross_entropy(net(x), Y, reduction="none") * (Y != -100)).sum() / 6
        weighing = weigh(inner) if watched else None
        (gradient,) = torch.autograd.grad(inner, x, create_graph=True)
        outer = gradient.pow(2).sum(1).sqrt().sub(1).pow(2).mean()
        second = weigh(outer) if watched else None
        outer.backward()
        if weighing is not None and second is not None:
            weighing.remove()
            second.remove()
            assert all(not tensor.requires_grad for tensor in weighing.late())
            assert [t.total for t in weighing.read()] == [pytest.approx(1)]
            assert [(t.total, t.positions) for t in second.read()] == [(pytest.approx(1), 8)]
        results.append([p.grad for p in net.parameters() if p.grad is not None])
    for plain, weighed_too in zip(*results, strict=True):
        assert torch.equal(plain, weighed_too)


def test_a_coefficient_with_a_graph_of_its_own_is_kept_without_it() -> None:
    """A learned factor under create_graph: the gradient that arrives is itself differentiable."""
    net, factor = model(), nn.Parameter(torch.tensor(2.0))
    loss = factor * F.mse_loss(net(X), VALUES)
    weighing = weigh(loss)
    torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    assert [tensor.requires_grad for tensor in weighing.late()] == [False]
    assert weighing.read()[0].total == 2.0


def test_a_retained_graph_is_weighed_again() -> None:
    loss = (F.cross_entropy(model()(X), Y, reduction="none") * (Y != -100)).sum() / 6
    for factor in (1.0, 3.0):
        weighing = weigh(loss)
        loss.backward(torch.tensor(factor), retain_graph=True)
        weighing.remove()
        assert weighing.read()[0].total == pytest.approx(factor)
    first = weigh(loss)
    loss.backward(retain_graph=True)
    loss.backward(torch.tensor(5.0))  # hooks still on: the first pass is the one that was weighed
    assert first.read()[0].total == pytest.approx(1)


def test_a_freed_graph_raises_torchs_own_error_and_nothing_else() -> None:
    for name in ("mean", "masked", "soft", "bce"):
        loss = LOSSES[name](model()(X))
        loss.backward()
        weighing = weigh(loss)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        weighing.remove()
        for term in weighing.read():
            assert term.supervised is None or term.supervised <= term.positions


def test_terms_that_no_gradient_reaches_are_left_out() -> None:
    one_net, other = model(), model()
    loss = F.cross_entropy(one_net(X), Y) + F.mse_loss(other(X), VALUES)
    weighing = weigh(loss)
    loss.backward(inputs=list(other.parameters()))
    weighing.remove()
    assert [t.loss for t in weighing.read()] == ["mse"]


def test_hooks_come_off() -> None:
    loss = (F.cross_entropy(model()(X), Y, reduction="none") * (Y != -100)).sum() / 6
    weighing = weigh(loss)
    weighing.remove()
    weighing.remove()
    loss.backward()
    assert weighing.late() == []
    assert weighing.read() == ()


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("backward", [True, False])
def test_a_weighing_keeps_no_graph_alive(name: str, backward: bool) -> None:
    """Without the cycle collector: a hook that captured its node would hold every activation."""
    gc.collect()
    gc.disable()
    try:
        out = model()(X) * 1
        alive = weakref.ref(out)
        loss = LOSSES[name](out)
        weighing = weigh(loss)
        if backward:
            loss.backward()
            weighing.remove()
        del out, loss
        assert alive() is None
        weighing.read()
    finally:
        gc.enable()


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(function.name())
        return function(*args, **(kwargs or {}))


def test_the_usual_mean_takes_no_operation_of_its_own() -> None:
    """The gradient and the node's own count are kept as they are; the host reads when asked."""
    for loss in (F.cross_entropy(model()(X), Y) / 4, F.mse_loss(model()(X), VALUES), (model()(X) - 1).abs().mean()):
        loss.backward(retain_graph=True)
        with Count() as plain:
            loss.backward(retain_graph=True)
        with Count() as watched:
            weighing = weigh(loss)
            loss.backward()
            weighing.remove()
            late = weighing.late()
        assert watched.calls == plain.calls
        assert all(tensor.dim() == 0 for tensor in late)
        with Count() as reading:
            weighing.read()
        assert len(reading.calls) == len(late) <= 2


@pytest.mark.parametrize("name", list(LOSSES))
def test_nothing_is_read_to_the_host_before_it_is_asked_for(name: str) -> None:
    net = model()
    loss = LOSSES[name](net(X))
    with Count() as mode:
        weighing = weigh(loss)
        loss.backward()
        weighing.remove()
        weighing.late()
    assert not [call for call in mode.calls if "_local_scalar_dense" in call or "nonzero" in call]


def test_numbers_read_by_the_caller() -> None:
    losses = [F.cross_entropy(model()(X), Y), (F.mse_loss(model()(X), VALUES, reduction="none") * VALUES).mean()]
    weighings = []
    for loss in losses:
        weighings.append(weigh(loss))
        loss.backward()
    late = [w.late() for w in weighings]
    numbers = torch.stack([t.double() for tensors in late for t in tensors]).tolist()
    for weighing, tensors in zip(weighings, late, strict=True):
        mine, numbers = numbers[: len(tensors)], numbers[len(tensors) :]
        assert weighing.read(mine) == weighing.read()


def test_without_detail_everything_but_the_spread() -> None:
    loss = (F.cross_entropy(model()(X), Y, reduction="none") * (Y != -100)).sum() / 6
    weighing = weigh(loss, detail=False)
    loss.backward()
    (term,) = weighing.read()
    assert (term.supervised, term.total) == (6, pytest.approx(1))
    assert math.isnan(term.spread)


def test_grad_scaler() -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(net(X), Y)
    term = one(scaler.scale(loss))
    assert term.total == 1024.0
    scaler.step(optimizer)
    scaler.update()
