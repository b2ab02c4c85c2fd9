"""Laws 1, 4, 5 and 7: the update's gradient, its clipping, and that a skip changes nothing."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import MixedPrecisionManager, NonFiniteError


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)).to(dtype)


def make_batches(sizes: list[int], seed: int = 1, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 6, generator=generator, dtype=dtype), torch.randint(0, 5, (n,), generator=generator))
        for n in sizes
    ]


def big_batch_gradient(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The FP64 gradient of the mean over every example, in one batch."""
    twin = copy.deepcopy(model).double()
    x = torch.cat([x for x, _ in batches]).double()
    y = torch.cat([y for _, y in batches])
    F.cross_entropy(twin(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in twin.parameters()])


def applied_gradient(before: list[Tensor], model: nn.Module, lr: float) -> Tensor:
    """What SGD of this rate applied, from what it changed."""
    return torch.cat([((b - p.detach()) / lr).reshape(-1) for b, p in zip(before, model.parameters(), strict=True)])


def values_of(*objects: nn.Module | torch.optim.Optimizer) -> list[Tensor]:
    """Everything a skip must leave alone, copied."""
    out: list[Tensor] = []
    for one in objects:
        if isinstance(one, nn.Module):
            out += [t.detach().clone() for t in one.state_dict().values()]
        else:
            for state in one.state.values():
                out += [v.detach().clone() for v in state.values() if isinstance(v, Tensor)]
    return out


LAW_7 = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["ahead", "along", "read"])
def test_ragged_group_gives_the_big_batch_gradient(precision: str, fused: bool, how: str, late: bool) -> None:
    model, batches = make_model(), make_batches([3, 7, 1, 5])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    manager = MixedPrecisionManager(precision=precision, max_norm=None)
    expected = big_batch_gradient(model, batches)
    before = [p.detach().clone() for p in model.parameters()]
    if how == "along":
        for x, y in batches:
            with manager.context():
                loss = F.cross_entropy(model(x).float(), y)
            manager.backward(loss, weight=len(x))
    else:
        weight = (lambda batch: len(batch[0])) if how == "ahead" else None
        for group in manager.groups(batches, 4, weight=weight):
            for x, y in group:
                with manager.context():
                    loss = F.cross_entropy(model(x).float(), y)
                manager.backward(loss)
            break
    update = manager.step(model, optimizer)
    got = applied_gradient(before, model, 1.0).double()
    contributions = sum(big_batch_gradient(make_model(), [b]).norm() * len(b[0]) / 16 for b in batches)
    # the difference of two FP32 weights, not the gradient itself, is what is read here: 1e-6 more
    assert (got - expected).norm() <= (LAW_7[precision] + 1e-6) * contributions
    assert update.applied
    assert update.weight == 16
    assert update.micro_batches == 4
    assert update.grad_norm == pytest.approx(float(expected.norm()), rel=LAW_7[precision] * 3)


def test_fp64_multi_tensor_path_is_exact() -> None:
    model, batches = make_model(dtype=torch.float64), make_batches([3, 7, 1, 5], dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    manager = MixedPrecisionManager(precision="fp32", max_norm=0.01)
    expected = big_batch_gradient(model, batches)
    before = [p.detach().clone() for p in model.parameters()]
    for group in manager.groups(batches, 4, weight=lambda b: len(b[0])):
        for x, y in group:
            manager.backward(F.cross_entropy(model(x), y))
        update = manager.step(model, optimizer)
    clipped = expected * (0.01 / (expected.norm() + 1e-6))
    got = applied_gradient(before, model, 1.0)
    assert (got - clipped).norm() <= 1e-12 * expected.norm()
    assert update.clip_coefficient == pytest.approx(0.01 / (float(expected.norm()) + 1e-6), rel=1e-12)


def test_never_a_mean_of_means() -> None:
    """512 elements of mean 2 and 1536 of mean 4 are 2048 of mean 3.5."""
    scale = nn.Parameter(torch.ones(()))
    module = nn.Module()
    module.scale = scale
    optimizer = torch.optim.SGD([scale], lr=1.0)
    for reduction in ("mean", "sum", "none"):
        scale.data.fill_(1.0)
        manager = MixedPrecisionManager(precision="fp32", max_norm=None)
        data = [torch.full((512,), 2.0), torch.full((1536,), 4.0)]
        for group in manager.groups(data, 2, weight=len, reduction=reduction):
            for elements in group:
                losses = elements * scale
                if reduction == "none":
                    loss = losses.sum() / group.weight
                else:
                    loss = losses.mean() if reduction == "mean" else losses.sum()
                manager.backward(loss)
            update = manager.step(module, optimizer)
        assert update.loss == pytest.approx(3.5)
        assert 1.0 - scale.item() == pytest.approx(3.5)
        assert update.weight == 2048


def test_one_denominator_for_each_term(late: bool) -> None:
    """Two terms with other counts: each is divided by its own W, ahead and along alike."""
    torch.manual_seed(0)
    tokens = [torch.randn(n, 6) for n in (3, 8, 2)]
    pairs = [torch.randn(n, 6) for n in (4, 1, 0)]
    reference = make_model().double()
    first = torch.cat([reference(t.double()).square().mean(-1) for t in tokens])
    second = torch.cat([reference(p.double()).exp().mean(-1) for p in pairs])
    (first.sum() / 13 + second.sum() / 5).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    for how in ("ahead", "along"):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        manager = MixedPrecisionManager(precision="fp32", max_norm=None)
        before = [p.detach().clone() for p in model.parameters()]
        data = list(zip(tokens, pairs, strict=True))

        def losses(t: Tensor, p: Tensor, model: nn.Module = model) -> list[Tensor]:
            return [model(t).square().mean(-1).mean(), model(p).exp().mean(-1).mean()]

        if how == "ahead":
            for group in manager.groups(data, 3, weight=lambda b: (len(b[0]), len(b[1]))):
                for t, p in group:
                    manager.backward(losses(t, p))
                update = manager.step(model, optimizer)
        else:
            for t, p in data:
                manager.backward(losses(t, p), weight=[len(t), len(p)])
            update = manager.step(model, optimizer)
        got = applied_gradient(before, model, 1.0).double()
        assert (got - expected).norm() <= 1e-5 * expected.norm(), how
        assert update.weights == (13, 5)
        assert update.loss == pytest.approx(float((first.sum() / 13 + second.sum() / 5).detach()), rel=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clips_the_real_norm_once(fused: bool, precision: str, late: bool) -> None:
    model, batches = make_model(), make_batches([4, 4])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    manager = MixedPrecisionManager(precision=precision, max_norm=0.05)
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in batches:
        with manager.context():
            loss = F.cross_entropy(model(x).float(), y)
        manager.backward(loss, weight=len(x))
    update = manager.step(model, optimizer)
    assert update.grad_norm > 0.05
    assert update.clip_coefficient == pytest.approx(0.05 / (update.grad_norm + 1e-6), rel=1e-6)
    assert float(applied_gradient(before, model, 1.0).norm()) == pytest.approx(0.05, rel=1e-4)
    norms = update.layer_norms
    assert list(norms) == [name for name, _ in model.named_parameters()]
    assert math.hypot(*norms.values()) == pytest.approx(update.grad_norm, rel=1e-5)


OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW amsgrad fused": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW tensor lr fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "Adam maximize fused": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, fused=True),
    "SGD momentum fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD damped fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_gets_the_real_clipped_gradient(kind: str, late: bool) -> None:
    """Six updates under a loss scale, against the same optimizer unfused, fed FP64-made gradients by hand."""
    model = make_model()
    twin = copy.deepcopy(model)
    optimizer = OPTIMIZERS[kind](model.parameters())
    by_hand = OPTIMIZERS[kind](twin.parameters())
    for group in by_hand.param_groups:
        group["fused"] = None
    manager = MixedPrecisionManager(precision="fp16", max_norm=0.3, init_scale=2.0**10)
    for step, (x, y) in enumerate(make_batches([5] * 6)):
        # no half precision here: the loss is made outside context(), only scaled
        manager.backward(F.cross_entropy(model(x), y))
        assert manager.step(model, optimizer).applied, step
        F.cross_entropy(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        by_hand.step()
        by_hand.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_skip_changes_nothing_the_first_update_included(kind: str, precision: str, late: bool) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    manager = MixedPrecisionManager(precision=precision)
    (x, y), (x2, y2) = make_batches([4, 4])
    clean = copy.deepcopy(model)

    def poisoned() -> None:
        loss = F.cross_entropy(model(x), y)
        manager.backward(loss * float("inf") if precision == "fp32" else loss * 1e36)

    before, rate = values_of(model), optimizer.param_groups[0]["lr"]
    rate = rate.clone() if isinstance(rate, Tensor) else rate
    poisoned()
    update = manager.step(model, optimizer, scheduler)
    assert update.skipped
    assert update.applied_updates == 0
    assert update.attempted_updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, values_of(model), strict=True))
    assert optimizer.param_groups[0]["lr"] == rate
    assert scheduler.last_epoch == 0
    assert all(p.grad is None for p in model.parameters())
    if not any(optimizer.state.values()):
        fresh: list[Tensor] = []
    else:
        fresh = [v for s in optimizer.state.values() for k, v in s.items() if isinstance(v, Tensor)]
    if "Adagrad" not in kind:  # which fills its sums when it is made
        assert all(not v.any() for v in fresh)

    # and the update after it is the one a fresh optimizer makes
    manager.backward(F.cross_entropy(model(x2), y2))
    assert manager.step(model, optimizer, scheduler).applied
    other = OPTIMIZERS[kind](clean.parameters())
    again = MixedPrecisionManager(precision=precision, init_scale=manager.loss_scale)
    again.backward(F.cross_entropy(clean(x2), y2))
    again.step(clean, other)
    for p, q in zip(model.parameters(), clean.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)

    # now with state in the optimizer
    before = values_of(model, optimizer)
    poisoned()
    assert manager.step(model, optimizer, scheduler).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, values_of(model, optimizer), strict=True))


def test_raise_names_the_parameter_and_changes_nothing(late: bool) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = MixedPrecisionManager(precision="fp32", on_nonfinite="raise")
    ((x, y),) = make_batches([4])
    before = values_of(model)
    loss = F.cross_entropy(model(x), y) + model[2].bias.sum() * float("nan")
    manager.backward(loss)
    with pytest.raises(NonFiniteError, match=r"2\.bias"):
        manager.step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, values_of(model), strict=True))
    assert not optimizer.state
    assert manager.pending == 1
    assert manager.discard() == 1
    manager.backward(F.cross_entropy(model(x), y))
    assert manager.step(model, optimizer).applied


def test_ignore_applies_a_nonfinite_gradient(late: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="fp32", on_nonfinite="ignore")
    ((x, y),) = make_batches([4])
    manager.backward(F.cross_entropy(model(x), y) * float("nan"))
    assert manager.step(model, optimizer).applied
    assert all(p.isnan().all() for p in model.parameters())


class Embedder(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 4, sparse=sparse)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sparse_gradients_as_dense_ones(precision: str, late: bool) -> None:
    sparse, dense = Embedder(True), Embedder(False)
    tokens, targets = torch.tensor([[1, 1, 2], [2, 5, 1]]), torch.tensor([0, 2])
    norms = []
    for model in (sparse, dense):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        manager = MixedPrecisionManager(precision=precision, max_norm=0.1)
        for _ in range(3):
            for _ in range(2):
                manager.backward(F.cross_entropy(model(tokens), targets), weight=2)
            norms.append(manager.step(model, optimizer).grad_norm)
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-5)
    torch.testing.assert_close(sparse.embedding.weight, dense.embedding.weight)


def test_frozen_unused_tied_and_grouped_parameters() -> None:
    """Frozen ones stay, unused ones have no norm, tied ones count once, groups keep their own rates."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(6, 6)
            self.outer = nn.Linear(6, 6)
            self.outer.weight = self.inner.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.unused = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.frozen(self.inner(x)))

    model = Tied()
    weights = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.0}], fused=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    manager = MixedPrecisionManager(precision="bf16")
    with manager.context():
        out = model(torch.randn(3, 6))
    manager.backward(out.float().square().mean())
    update = manager.step(model, optimizer)
    assert update.lrs == (0.1, 0.0)
    assert set(update.layer_norms) == {"inner.weight", "inner.bias", "outer.bias"}
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"inner.weight"}
    # unfrozen later: it takes part from then on, once the optimizer owns it
    model.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 0.1})
    with manager.context():
        out = model(torch.randn(3, 6))
    manager.backward(out.float().square().mean())
    assert "frozen.weight" in manager.step(model, optimizer).layer_norms


def test_alternating_experts_under_fused_momentum(late: bool) -> None:
    """Parameters that get their first gradient later, the number of gradients staying the same."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    twin = copy.deepcopy(model)
    for dampening in (0.0, 0.3):
        fused = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=True)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
        manager = MixedPrecisionManager(precision="fp16", max_norm=None, init_scale=16.0)
        for step in (0, 1, 2, 0, 1, 2):
            x = torch.randn(2, 4)
            manager.backward(model[step](x).square().mean())
            manager.step(model, fused)
            twin[step](x).square().mean().backward()
            plain.step()
            plain.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("kind", ["AdamW fused", "SGD momentum fused", "AdamW amsgrad fused"])
def test_channels_last_with_state_of_another_layout(kind: str) -> None:
    """A checkpoint written before channels_last: fused kernels would pair wrong elements."""

    def convolution() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    plain = convolution()
    first = OPTIMIZERS[kind](plain.parameters())
    for _ in range(2):
        plain(x).square().mean().backward()
        first.step()
        first.zero_grad()
    checkpoint = copy.deepcopy((plain.state_dict(), first.state_dict()))

    model = convolution()
    model.load_state_dict(checkpoint[0])
    model = model.to(memory_format=torch.channels_last)
    optimizer = OPTIMIZERS[kind](model.parameters())
    optimizer.load_state_dict(checkpoint[1])
    manager = MixedPrecisionManager(precision="fp32", max_norm=None)
    for _ in range(3):
        plain(x).square().mean().backward()
        first.step()
        first.zero_grad()
        manager.backward(model(x.to(memory_format=torch.channels_last)).square().mean())
        manager.step(model, optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_optimizer_loaded_from_a_non_fused_checkpoint() -> None:
    """Loading switches ``fused`` off in the groups; torch's own scaler then trips over its stale flag."""
    model, twin = make_model(), make_model()
    source = torch.optim.AdamW(twin.parameters(), lr=0.01)
    ((x, y),) = make_batches([4])
    F.cross_entropy(twin(x), y).backward()
    source.step()
    source.zero_grad()
    model.load_state_dict(twin.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    manager = MixedPrecisionManager(precision="fp16", init_scale=1024.0)
    manager.backward(F.cross_entropy(model(x), y))
    assert manager.step(model, optimizer).applied
    F.cross_entropy(twin(x), y).backward()
    source.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_hooks_before_the_optimizer_see_real_gradients() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seen: list[float] = []

    def read(*_: object) -> None:
        seen.append(float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()))

    optimizer.register_step_pre_hook(read)
    manager = MixedPrecisionManager(precision="fp16", max_norm=None)
    ((x, y),) = make_batches([4])
    manager.backward(F.cross_entropy(model(x), y))
    update = manager.step(model, optimizer)
    assert seen == [pytest.approx(update.grad_norm, rel=1e-6)]


def test_bf16_parameters_are_accepted_and_told() -> None:
    model = make_model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = MixedPrecisionManager(precision="bf16", max_norm=1e-3)
    ((x, y),) = make_batches([4])
    with manager.context():
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
    manager.backward(loss)
    update = manager.step(model, optimizer)
    norm = math.hypot(*update.layer_norms.values())
    assert update.grad_norm == pytest.approx(norm, rel=1e-5)
    assert "none for 4 BF16 parameters" in manager.report()["precision"]["master_weights"]


def test_long_gradients_are_summed_exactly() -> None:
    """The CPU's single-pass FP32 norm errs by 1e-4 at 8 million elements; ours by rounding only."""
    parameter = nn.Parameter(torch.zeros(2**21 + 7))
    module = nn.Module()
    module.parameter = parameter
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    manager = MixedPrecisionManager(precision="fp32")
    data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    manager.backward((parameter * data).sum())
    assert manager.step(module, optimizer).grad_norm == pytest.approx(float(data.double().norm()), rel=2e-7)


def test_update_reads_as_one_line_and_flat_values() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, fused=True)
    manager = MixedPrecisionManager(precision="fp16", max_norm=0.01)
    for x, y in make_batches([4, 2]):
        manager.backward(F.cross_entropy(model(x), y), weight=len(x))
    update = manager.step(model, optimizer)
    text = repr(update)
    assert "\n" not in text
    for part in ("applied", "scale 65536", "lr 0.25", "2 micro-batches", "weight 6", "clipped"):
        assert part in text
    row = update.as_dict()
    assert row["outcome"] == "applied"
    assert row["lr"] == 0.25
    assert row["weight_seen"] == 6
    assert row["examples"] is None
    assert all(isinstance(v, (str, int, float, type(None))) for v in row.values())
    layers = update.as_dict(layers=True)
    assert layers["layer_norms/0.weight"] == update.layer_norms["0.weight"]


def test_counters_and_sums_over_updates(late: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="fp32")
    batches = make_batches([3, 2, 4])
    updates = []
    for group in manager.groups(batches, 2, weight=lambda b: 0 if len(b[0]) == 4 else len(b[0])):
        for x, y in group:
            manager.backward(F.cross_entropy(model(x), y))
        updates.append(manager.step(model, optimizer))
    assert [u.outcome for u in updates] == ["applied", "empty"]
    assert [u.examples for u in updates] == [5, 4]
    assert [u.examples_seen for u in updates] == [5, 9]
    assert [u.weight_seen for u in updates] == [5, 5]
    assert [u.attempted_updates for u in updates] == [1, 2]
    assert [u.applied_updates for u in updates] == [1, 1]
    assert all(u.replicas == 1 for u in updates)


def test_split_invariance_over_every_split_of_six() -> None:
    """Law 7 in FP32, for every way to cut six examples into groups of micro-batches."""
    batches = make_batches([6])
    (x, y) = batches[0]
    expected = big_batch_gradient(make_model(), batches)
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 6), k) for k in range(6)):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        manager = MixedPrecisionManager(precision="fp32", max_norm=None)
        before = [p.detach().clone() for p in model.parameters()]
        bounds = [0, *cuts, 6]
        pieces = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(bounds)]
        for group in manager.groups(pieces, 6, weight=lambda b: len(b[0])):
            for px, py in group:
                manager.backward(F.cross_entropy(model(px), py))
            manager.step(model, optimizer)
        assert (applied_gradient(before, model, 1.0).double() - expected).norm() <= 1.1e-5 * expected.norm()
