"""Groups: fetched first, weighed in every way, short last ones, nothing supervised."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import MixedPrecisionManager, PolicyError, WeightError, tokens


def make(precision: str = "fp32", **policy: Any) -> tuple[nn.Module, torch.optim.Optimizer, MixedPrecisionManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    return model, optimizer, MixedPrecisionManager(precision=precision, **policy)


def test_no_more_than_the_current_group_is_taken() -> None:
    model, optimizer, manager = make()
    taken = 0

    def loader() -> Iterator[Tensor]:
        nonlocal taken
        for _ in range(7):
            taken += 1
            yield torch.ones(2, 4)

    lengths, seen = [], []
    for group in manager.groups(loader(), 3, weight=len):
        seen.append(taken)
        lengths.append(len(group))
        assert group.weight == 2 * len(group)
        assert group.examples == 2 * len(group)
        assert group.short is (len(group) < 3)
        for x in group:
            manager.backward(model(x).mean())
        manager.step(model, optimizer)
    assert lengths == [3, 3, 1]
    assert seen == [3, 6, 7]


def test_micro_batches_and_graphs_are_released_as_they_are_used() -> None:
    model, optimizer, manager = make()
    alive: list[weakref.ref[Tensor]] = []

    def loader() -> Iterator[Tensor]:
        for _ in range(4):
            x = torch.ones(2, 4)
            alive.append(weakref.ref(x))
            yield x
            del x

    for group in manager.groups(loader(), 2, weight=len):
        for number, x in enumerate(group):
            out = model(x)
            loss = out.mean()
            manager.backward(loss)
            outputs = weakref.ref(out)
            del out, loss, x
            gc.collect()
            assert outputs() is None
            if number == 1:
                assert alive[-2]() is None
        manager.step(model, optimizer)
    gc.collect()
    assert all(ref() is None for ref in alive)


@pytest.mark.parametrize("kept", [True, False])
def test_a_short_last_group_is_a_choice_on_record(kept: bool) -> None:
    model, optimizer, manager = make()
    data = [{"x": torch.ones(2, 4), "id": [f"{i}a", f"{i}b"]} for i in range(5)]
    applied = []
    for group in manager.groups(data, 2, weight=lambda b: len(b["x"]), drop_last=not kept, ids="id"):
        for batch in group:
            manager.backward(model(batch["x"]).mean())
        applied.append(manager.step(model, optimizer).weight)
    assert applied == ([4, 4, 2] if kept else [4, 4])
    last = manager.report()["last_group"]
    assert last["groups"] == [{"kept": kept, "micro_batches": 1, "size": 2, "examples": 2, "ids": ["4a", "4b"]}]
    assert (last["kept"], last["dropped"]) == ((1, 0) if kept else (0, 1))
    assert len(manager.groups(data, 2, drop_last=not kept)) == len(applied)


def test_a_loader_shorter_than_a_group_that_is_dropped_gives_nothing() -> None:
    _, _, manager = make()
    assert list(manager.groups([torch.ones(2, 4)], 3, drop_last=True)) == []
    assert manager.report()["last_group"]["dropped"] == 1


def test_tokens_counts_what_a_shifted_model_predicts() -> None:
    labels = torch.tensor([[5, 6, -100, 7], [-100, -100, -100, 1], [9, -100, -100, -100]])
    batch = {"labels": labels}
    assert int(tokens("labels")(batch)) == 3  # the first label of a sequence is never predicted
    assert int(tokens("labels", shift=False)(batch)) == 5
    assert int(tokens("labels", ignore_index=7, shift=False)(batch)) == 11
    assert int(tokens(1)((None, labels))) == 3

    class Batch:
        pass

    other = Batch()
    other.labels = labels.tolist()  # type: ignore[attr-defined]
    assert int(tokens("labels")(other)) == 3
    with pytest.raises(PolicyError, match="no 'label'"):
        tokens("label")(batch)


LOSSES: dict[str, Any] = {
    "cross_entropy": (lambda o, y: F.cross_entropy(o, y), None),
    "class weights": (lambda o, y: F.cross_entropy(o, y, weight=torch.arange(1.0, 6.0)), None),
    "ignore_index": (lambda o, y: F.cross_entropy(o, torch.where(y == 2, -100, y)), None),
    "label smoothing": (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), None),
    "soft targets": (lambda o, y: F.cross_entropy(o, F.one_hot(y, 5).float() * 0.9 + 0.02), None),
    "masked mean": (lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y != 2)).sum() / (y != 2).sum(), None),
    "boolean index": (lambda o, y: F.cross_entropy(o, y, reduction="none")[y != 2].mean(), None),
    "mse": (lambda o, y: F.mse_loss(o, F.one_hot(y, 5).float()), None),
    "l1": (lambda o, y: F.l1_loss(o, F.one_hot(y, 5).float()), None),
    "huber": (lambda o, y: F.huber_loss(o, F.one_hot(y, 5).float()), None),
    "bce": (lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 5).float()), None),
    "kl": (lambda o, y: F.kl_div(o.log_softmax(-1), F.one_hot(y, 5) * 0.9 + 0.02, reduction="batchmean"), None),
    "summed squares": (lambda o, y: (o - F.one_hot(y, 5)).square().sum(-1).mean(), None),
    "sum": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), "sum"),
    "sum ignoring": (lambda o, y: F.cross_entropy(o, torch.where(y == 2, -100, y), reduction="sum"), "sum"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSES)
def test_weights_are_read_from_the_loss(kind: str, late: bool) -> None:
    """No weight is declared; the group's gradient is that of the loss over all its examples at once."""
    loss_fn, reduction = LOSSES[kind]
    torch.manual_seed(2)
    data = [(torch.randn(n, 4), torch.randint(0, 5, (n,))) for n in (3, 9, 4)]
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    twin, _, _ = make()
    whole = loss_fn(twin(x), y)
    if reduction == "sum":
        whole = whole / ((y != 2).sum() if "ignoring" in kind else len(y))
    whole.backward()
    model, optimizer, manager = make(max_norm=None)
    before = [p.detach().clone() for p in model.parameters()]
    for group in manager.groups(data, 3, reduction=reduction or "mean"):
        for bx, by in group:
            with manager.context():
                out = model(bx)
            manager.backward(loss_fn(out, by))
        assert group.weight is None
        update = manager.step(model, optimizer)
    for old, new, p in zip(before, model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close((old - new.detach()) / 0.5, p.grad, rtol=1e-4, atol=2e-6)
    assert update.loss == pytest.approx(float(whole.detach()), rel=1e-5)
    normalisation = manager.report()["normalisation"]
    assert normalisation["weights"] == {"read from the loss": 1}
    assert normalisation["verdict"] != "unverified" or kind == "soft targets"


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.expand(2, 5) / 10


def test_what_cannot_be_read_counts_examples_and_says_so() -> None:
    model, optimizer, manager = make()
    for group in manager.groups([torch.ones(2, 4)] * 2, 2):
        for x in group:
            manager.backward(Opaque.apply(model(x)))
        update = manager.step(model, optimizer)
    assert update.weight == 4
    normalisation = manager.report()["normalisation"]
    assert normalisation["weights"] == {"examples, unverified": 1}
    assert normalisation["verdict"] == "unverified"
    assert "OpaqueBackward" in normalisation["counted_examples_instead"]


def test_a_scalar_with_two_denominators_is_not_guessed() -> None:
    model, optimizer, manager = make()
    data = [(torch.randn(n, 4), torch.zeros(n, dtype=torch.long)) for n in (2, 3)]
    for group in manager.groups(data, 2):
        for x, y in group:
            out = model(x)
            manager.backward(F.cross_entropy(out, y) + 0.1 * F.mse_loss(out[:1], torch.zeros(1, 5)))
        manager.step(model, optimizer)
    assert "denominators of their own" in manager.report()["normalisation"]["counted_examples_instead"]
    # as a list each is read and divided by itself
    model, optimizer, manager = make()
    for group in manager.groups(data, 2):
        for x, y in group:
            out = model(x)
            manager.backward([F.cross_entropy(out, y), 0.1 * F.mse_loss(out[:1], torch.zeros(1, 5))])
        update = manager.step(model, optimizer)
    assert update.weights is not None
    assert update.weights[0] == 5
    assert manager.report()["normalisation"]["weights"] == {"read from the loss": 1}


def test_a_weight_read_in_one_micro_batch_only_is_refused() -> None:
    model, _, manager = make()
    (group,) = [next(manager.groups([torch.ones(2, 4)] * 2, 2))]
    batches = iter(group)
    x = next(batches)
    manager.backward(F.mse_loss(model(x), torch.zeros(2, 5)))
    x = next(batches)
    with pytest.raises(WeightError, match="cannot be read"):
        manager.backward(Opaque.apply(model(x)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("how", ["ahead", "along", "read"])
def test_weight_zero_contributes_exactly_nothing(precision: str, how: str, late: bool) -> None:
    """A padded micro-batch whose hand-written masked mean is 0/0: NaN, and no trace of it."""
    torch.manual_seed(1)
    data = [(torch.randn(3, 4), torch.ones(3)), (torch.randn(3, 4), torch.zeros(3)), (torch.randn(3, 4), torch.ones(3))]

    def train(batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Any]:
        model, optimizer, manager = make(precision)

        def loss(x: Tensor, mask: Tensor) -> Tensor:
            with manager.context():
                out = model(x)
            return (out.float().square().mean(-1) * mask).sum() / mask.sum()

        if how == "along":
            for x, mask in batches:
                manager.backward(loss(x, mask), weight=mask.sum())
            update = manager.step(model, optimizer)
        else:
            weight = (lambda b: b[1].sum()) if how == "ahead" else None
            for group in manager.groups(batches, 3, weight=weight):
                for x, mask in group:
                    manager.backward(loss(x, mask))
                update = manager.step(model, optimizer)
        return [p.detach().clone() for p in model.parameters()], update

    with_padding, update = train(data)
    without, other = train([data[0], data[2]])
    assert update.outcome == other.outcome == "applied"
    assert update.loss == pytest.approx(other.loss, rel=1e-6)
    assert update.weight == other.weight == 6
    tolerance = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}[precision]
    for p, q in zip(with_padding, without, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance * 0.1)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("how", ["ahead", "along", "read"])
def test_nothing_supervised_is_an_empty_update(precision: str, how: str, late: bool) -> None:
    model, optimizer, manager = make(precision)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    data = [(torch.ones(2, 4), torch.full((2,), -100))] * 2
    before = [p.detach().clone() for p in model.parameters()]
    scale = manager.loss_scale
    if how == "along":
        for x, y in data:
            manager.backward(F.cross_entropy(model(x), y), weight=(y != -100).sum())
        update = manager.step(model, optimizer, scheduler)
    else:
        for group in manager.groups(data, 2, weight=tokens(1, shift=False) if how == "ahead" else None):
            for x, y in group:
                manager.backward(F.cross_entropy(model(x), y))
            update = manager.step(model, optimizer, scheduler)
    assert update.outcome == "empty"
    assert (update.loss, update.grad_norm, update.weight) == (0.0, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert scheduler.last_epoch == 0
    assert manager.loss_scale == scale
    assert manager.scaler.state_dict().get("_growth_tracker", 0) == 0
    counters = manager.report()["counters"]
    assert (counters["attempted"], counters["applied"], counters["empty"]) == (1, 0, 1)


def test_the_flat_loops_tail() -> None:
    model, optimizer, manager = make()
    weights = []
    for number, n in enumerate((3, 5, 2), 1):
        manager.backward(model(torch.ones(n, 4)).mean(), weight=n)
        if number % 2 == 0:
            weights.append(manager.step(model, optimizer).weight)
    assert manager.pending == 1
    if manager.pending:
        weights.append(manager.step(model, optimizer).weight)
    assert weights == [8, 2]
    assert manager.pending == 0


def test_several_backwards_for_one_micro_batch() -> None:
    """Two losses on one forward, each its own backward: the group's W counts a micro-batch once."""
    model, optimizer, manager = make(max_norm=None)
    twin, _, _ = make()
    data = [torch.randn(n, 4) for n in (2, 6)]
    sum((twin(x).square().mean(-1).sum() + twin(x).exp().mean(-1).sum()) / 8 for x in data).backward()
    before = [p.detach().clone() for p in model.parameters()]
    for group in manager.groups(data, 2, weight=len):
        for x in group:
            out = model(x)
            manager.backward(out.square().mean(-1).mean(), retain_graph=True)
            manager.backward(out.exp().mean(-1).mean())
        update = manager.step(model, optimizer)
    assert (update.weight, update.micro_batches, update.examples) == (8, 2, 8)
    for old, new, p in zip(before, model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close((old - new.detach()) / 0.5, p.grad, rtol=1e-4, atol=2e-6)


def test_stepping_inside_the_loop_on_the_last_micro_batch() -> None:
    model, optimizer, manager = make()
    steps = 0
    for group in manager.groups([torch.ones(2, 4)] * 5, 2, weight=len):
        for number, x in enumerate(group, 1):
            manager.backward(model(x).mean())
            if number == len(group):
                manager.step(model, optimizer)
                steps += 1
    assert steps == 3


def test_weights_on_the_record() -> None:
    model, optimizer, manager = make()
    manager.backward(model(torch.ones(2, 4)).mean())
    manager.step(model, optimizer)
    manager.backward(model(torch.ones(2, 4)).mean(), weight=2)
    manager.step(model, optimizer)
    weights = manager.report()["normalisation"]["weights"]
    assert weights == {"none: as the caller scaled it": 1, "counted along": 1}
