"""What is declared is held against what losses were seen to divide by: an error in the first group, a note later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import MixedPrecisionManager, WeightError

Loss = Callable[[Tensor, Tensor], Tensor]


def make(precision: str = "fp32") -> tuple[nn.Module, torch.optim.Optimizer, MixedPrecisionManager]:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), MixedPrecisionManager(precision=precision)


def supervised(counts: list[int], size: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of ``size`` rows of which only so many are supervised."""
    torch.manual_seed(1)
    data = []
    for count in counts:
        y = torch.randint(0, 5, (size,))
        y[count:] = -100
        data.append((torch.randn(size, 4), y))
    return data


def train(
    data: list[tuple[Tensor, Tensor]], loss_fn: Loss, size: int, precision: str = "fp32", **groups: Any
) -> MixedPrecisionManager:
    model, optimizer, manager = make(precision)
    for group in manager.groups(data, size, **groups):
        for x, y in group:
            with manager.context():
                out = model(x)
            manager.backward(loss_fn(out.float(), y))
        manager.step(model, optimizer)
    return manager


def rows(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[1])


def counted(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_averaged_over_other_elements_than_declared(precision: str) -> None:
    with pytest.raises(WeightError, match=r"averaged over 4, 3, 5 elements, you declared 6 each"):
        train(supervised([4, 3, 5]), F.cross_entropy, 3, precision, weight=rows)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_already_divided_by_the_group_size(precision: str, size: int) -> None:
    loss: Loss = lambda o, y: F.cross_entropy(o, y) / size  # noqa: E731
    with pytest.raises(WeightError, match=rf"already divided by A = {size}"):
        train(supervised([4] * size), loss, size, precision, weight=counted)


def test_already_divided_in_a_flat_loop() -> None:
    model, optimizer, manager = make()
    for x, y in supervised([4, 5]):
        manager.backward(F.cross_entropy(model(x), y) / 2, weight=(y != -100).sum())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(WeightError, match="already divided by A = 2"):
        manager.step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert manager.pending == 2
    assert manager.report()["counters"]["attempted"] == 0


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_reductions_that_are_not_the_losss(reduction: str) -> None:
    losses: dict[str, tuple[Loss, str]] = {
        "sum": (F.cross_entropy, 'is "sum", the loss averaged over 4, 3, 5'),
        "mean": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), r"sums over 4, 3, 5 elements.*\"mean\""),
        "none": (F.cross_entropy, "not all divided by one W"),
    }
    loss, match = losses[reduction]
    with pytest.raises(WeightError, match=match):
        train(supervised([4, 3, 5]), loss, 3, weight=counted, reduction=reduction)


RIGHT: dict[str, tuple[Loss, dict[str, Any]]] = {
    "counted": (F.cross_entropy, {"weight": counted}),
    "a sum": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), {"weight": counted, "reduction": "sum"}),
    "label smoothing": (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.2), {"weight": counted}),
    "a coefficient": (lambda o, y: 0.3 * F.cross_entropy(o, y), {"weight": counted}),
    "masked mean": (
        lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y >= 0)).sum() / (y >= 0).sum(),
        {"weight": counted},
    ),
    "a constant per unit": (lambda o, y: F.mse_loss(o[y >= 0], torch.zeros(1)), {"weight": counted}),
    "an auxiliary term": (lambda o, y: F.cross_entropy(o, y) + 1e-3 * o.square().mean(), {"weight": counted}),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_right_declarations_are_verified(kind: str, precision: str) -> None:
    loss, groups = RIGHT[kind]
    manager = train(supervised([4, 3, 5, 2, 6, 1]), loss, 2, precision, **groups)
    normalisation = manager.report()["normalisation"]
    assert normalisation["verdict"] == "verified"
    assert normalisation["looked_at_updates"] == 2  # updates 1 and 2 of 3
    assert normalisation["weighed_contributions"] == 4


def test_class_weights_are_verified_up_to_their_own_sum() -> None:
    """The denominator is a sum of class weights, not a count: no error where the user declares that sum."""
    weight = torch.arange(1.0, 6.0)

    def declared(batch: tuple[Tensor, Tensor]) -> Tensor:
        y = batch[1]
        return weight[y[y >= 0]].sum()

    loss: Loss = lambda o, y: F.cross_entropy(o, y, weight=weight)  # noqa: E731
    manager = train(supervised([4, 3, 5, 2]), loss, 2, weight=declared)
    assert manager.report()["normalisation"]["verdict"] == "verified"


def test_later_disagreement_is_a_note_never_an_error() -> None:
    """The first groups are full; from the fourth on some rows are padding, and the declared weight counts them."""
    manager = train(supervised([6] * 6 + [4, 3]), F.cross_entropy, 2, weight=rows)
    report = manager.report()
    assert report["counters"]["applied"] == 4
    assert report["normalisation"]["verdict"] == "disagrees"
    (note,) = [note for note in report["notes"] if note["note"] == "weights disagree"]
    assert "averaged over 4, 3 elements, you declared 6 each" in note["message"]
    assert note["update"] == 4


def test_a_quarter_of_an_auxiliary_term_is_no_division_by_four() -> None:
    model, optimizer, manager = make()
    for group in manager.groups(supervised([6] * 4), 4, weight=rows):
        for x, y in group:
            out = model(x)
            manager.backward([F.cross_entropy(out, y), 0.25 * F.mse_loss(out, torch.zeros_like(out))])
        assert manager.step(model, optimizer).applied


def test_means_that_hold_no_target_are_noted_not_refused() -> None:
    """A mean of outputs may be a loss or a part of one: nobody can tell what its elements are."""
    model, optimizer, manager = make()
    manager.backward(model(torch.ones(3, 4)).mean(), weight=7)
    manager.backward(model(torch.ones(3, 4)).mean(), weight=2)
    assert manager.step(model, optimizer).applied
    report = manager.report()
    assert report["normalisation"]["verdict"] == "unverified"
    assert "averaged over 15, 15 elements, you declared 7, 2" in report["notes"][0]["message"]


def test_opaque_losses_are_accepted_and_marked() -> None:
    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.mean()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.expand(6, 5) / 30

    manager = train(supervised([6, 6]), lambda o, y: Mean.apply(o), 2, weight=rows)
    normalisation = manager.report()["normalisation"]
    assert normalisation["verdict"] == "unverified"
    assert normalisation["weighed_contributions"] == 0
    assert "MeanBackward" in str(normalisation["opaque"])


def test_weighing_happens_at_powers_of_two_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.engine import contribute

    weighed: list[int] = []
    update = [0]
    original = contribute.weigh

    def spy(loss: Tensor, **kwargs: Any) -> Any:
        weighed.append(update[0])
        return original(loss, **kwargs)

    monkeypatch.setattr(contribute, "weigh", spy)
    model, optimizer, manager = make()
    for number in range(1, 21):
        update[0] = number
        for x, y in supervised([3, 4]):
            manager.backward(F.cross_entropy(model(x), y), weight=counted((x, y)))
        manager.step(model, optimizer)
    assert weighed == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
