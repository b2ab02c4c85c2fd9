"""assert_same_update: the accumulated gradient is the big batch's, or the cause is named with its numbers."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import HalfstepError, MisuseError, NonFiniteError, PolicyError, UpdateDiffersError
from halfstep.probe.same_update import SameUpdate, assert_same_update, measure_update
from halfstep.probe.whole import joined

CLASSES, WIDTH = 7, 6
OWN = torch.Generator().manual_seed(0)
Batch = dict[str, Tensor]


def ragged(*live: int, length: int = 5, seed: int = 0) -> list[Batch]:
    """Micro-batches of two sequences with so many supervised positions each."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in live:
        labels = torch.full((2 * length,), -100)
        labels[:count] = torch.randint(0, CLASSES, (count,), generator=generator)
        batches.append({"x": torch.randn(2, length, WIDTH, generator=generator), "labels": labels.view(2, length)})
    return batches


def network(*middle: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), *middle, nn.Linear(16, CLASSES)).to(dtype)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def half_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_loss(model, batch)


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Every sequence against all others of its batch."""
    features = F.normalize(model(batch["x"]).mean(1), dim=-1)
    return F.cross_entropy(features @ features.T * 5, torch.arange(len(features)))


def live(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


class Norm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def causes(found: SameUpdate) -> list[str]:
    return [cause.name for cause in found.causes]


@pytest.mark.parametrize("loss_fn", [mean_loss, half_loss])
def test_weighed_contributions_are_the_big_batch(loss_fn: Any) -> None:
    found = assert_same_update(network(), loss_fn, ragged(9, 2, 5), weight=live)
    assert found
    assert found.shares == (9 / 16, 2 / 16, 5 / 16)
    assert found.dtype == (torch.float32 if loss_fn is mean_loss else torch.bfloat16)
    assert found.tolerance == (1e-5 if loss_fn is mean_loss else 3e-2)
    assert found.causes == ()


def test_equal_micro_batches_may_be_divided_by_a_and_sums_added() -> None:
    assert_same_update(network(), mean_loss, ragged(4, 4, 4))
    assert_same_update(network(), sum_loss, ragged(9, 2, 5), reduction="sum")
    wide = [{name: t.double() if t.is_floating_point() else t for name, t in b.items()} for b in ragged(9, 2)]
    assert assert_same_update(network(dtype=torch.float64), mean_loss, wide, live).tolerance == 1e-12


def test_the_error_is_that_of_hand_written_gradients() -> None:
    model, batches = network(), ragged(9, 2)
    parts = [torch.autograd.grad(mean_loss(model, batch), list(model.parameters())) for batch in batches]
    whole = torch.autograd.grad(mean_loss(model, joined(batches)), list(model.parameters()))
    flat = [torch.cat([g.flatten() for g in gradients]) for gradients in (*parts, whole)]
    error = (flat[0] / 2 + flat[1] / 2 - flat[2]).norm() / (flat[0].norm() / 2 + flat[1].norm() / 2)
    found = measure_update(model, mean_loss, batches)
    assert found.error == pytest.approx(float(error), rel=1e-5)
    assert found.contribution_norms == pytest.approx([float(g.norm()) / 2 for g in flat[:2]], rel=1e-5)
    assert not found


def test_means_of_means_are_named_with_their_numbers() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same_update(network(), mean_loss, ragged(9, 2, 5))
    text = str(caught.value)
    assert isinstance(caught.value, UpdateDiffersError)
    assert isinstance(caught.value, HalfstepError)
    for words in (
        "means of means",
        "averages over 9, 2, 5 supervised elements",
        "multiplied by 0.3333, 0.3333, 0.3333",
        "made of 0.5625, 0.125, 0.3125",
        "halfstep.tokens",
        "3 micro-batches",
    ):
        assert words in text


def test_means_of_means_are_found_in_a_loss_whose_graph_tells_nothing() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    found = measure_update(network(), lambda model, batch: Opaque.apply(mean_loss(model, batch)), ragged(9, 2, 5))
    assert causes(found) == ["means of means"]
    assert "made of 0.5625, 0.125, 0.3125" in found.causes[0].seen


@pytest.mark.parametrize(
    ("make", "loss_fn", "weight", "settings", "names"),
    [
        (network, half_loss, None, {}, ["means of means"]),
        (network, sum_loss, None, {}, ["loss is a sum"]),
        (network, mean_loss, None, {"reduction": "sum"}, ["not divided"]),
        (network, lambda m, b: mean_loss(m, b) / len(b["x"]), live, {}, ["divided again"]),
        (lambda: network(Norm(16)), mean_loss, live, {}, ["BatchNorm"]),
        (lambda: network(Norm(16)), mean_loss, None, {}, ["BatchNorm", "means of means"]),
        (lambda: network(nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5)), mean_loss, live, {}, ["randomness"]),
        (network, lambda m, b: mean_loss(m, b) * torch.rand(()), live, {}, ["randomness"]),
        (network, lambda m, b: mean_loss(m, b) * torch.rand((), generator=OWN), live, {}, ["not repeatable"]),
        (network, contrastive_loss, None, {}, ["examples are mixed"]),
        (network, mean_loss, live, {"tolerance": 1e-10}, ["rounding"]),
    ],
    ids=[
        "half",
        "sum",
        "undivided",
        "again",
        "batchnorm",
        "both",
        "dropout",
        "noise",
        "own-noise",
        "mixed",
        "rounding",
    ],
)
def test_the_cause_is_named(make: Any, loss_fn: Any, weight: Any, settings: dict[str, Any], names: list[str]) -> None:
    found = measure_update(make(), loss_fn, ragged(9, 2, 5), weight, **settings)
    assert not found.same
    assert causes(found) == names
    assert all(cause.seen and cause.fix for cause in found.causes)


def test_modules_at_fault_are_named() -> None:
    with pytest.raises(UpdateDiffersError, match=r"2 \(Norm\) normalise by the statistics of 2, 2 examples"):
        assert_same_update(network(Norm(16)), mean_loss, ragged(9, 9))
    with pytest.raises(UpdateDiffersError, match=r"dropout in 2 \(Dropout\), 4 \(Dropout\)"):
        assert_same_update(network(nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5)), mean_loss, ragged(9, 9))


def test_evaluation_mode_is_taken_as_it_is() -> None:
    assert_same_update(network(nn.Dropout(0.5), Norm(16)).eval(), mean_loss, ragged(9, 2), live)


def test_a_micro_batch_of_weight_zero_is_not_run() -> None:
    found = assert_same_update(network(), mean_loss, ragged(9, 0, 5), live)
    assert found.contribution_norms[1] == 0.0
    with pytest.raises(NonFiniteError, match="micro-batch 1 is nan"):
        assert_same_update(network(), mean_loss, ragged(9, 0, 5))


@pytest.mark.parametrize("weight", [live, None], ids=["same", "differs"])
def test_nothing_changes(weight: Any) -> None:
    model = network(nn.Dropout(0.5), Norm(16))
    model[0].eval()
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.randn_like(parameter)
    frozen = next(model.parameters())
    before = copy.deepcopy(model)
    tensors = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    gradients = [p.grad for p in model.parameters()]
    values = [None if gradient is None else gradient.clone() for gradient in gradients]
    modes = [module.training for module in model.modules()]
    draws = torch.get_rng_state(), random.getstate()
    with pytest.raises(UpdateDiffersError):
        assert_same_update(model, mean_loss, ragged(9, 2, 5), weight)
    assert {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]} == tensors
    for (name, value), (_, old) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(value, old), name
    assert frozen.grad is None
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, value)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]


def test_what_is_frozen_or_unreached_is_no_difference() -> None:
    model = nn.ModuleDict({"used": network(), "idle": nn.Linear(2, 2)})
    model["used"][0].weight.requires_grad = False
    found = assert_same_update(model, lambda m, b: mean_loss(m["used"], b), ragged(9, 2), live)
    assert all("idle" not in name for name, _ in found.worst)


@dataclass
class Pair:
    x: Tensor
    names: list[str]
    temperature: float = 2.0


def test_batches_are_joined_by_member() -> None:
    one = (torch.ones(2, 3), {"ids": [torch.ones(2)], "k": 3, "none": None}, Pair(torch.ones(2), ["a", "b"]))
    two = (torch.zeros(1, 3), {"ids": [torch.zeros(1)], "k": 3, "none": None}, Pair(torch.zeros(1), ["c"]))
    tensor, mapping, pair = joined([one, two])
    assert torch.equal(tensor, torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))
    assert torch.equal(mapping["ids"][0], torch.tensor([1.0, 1.0, 0.0]))
    assert mapping["k"] == 3
    assert mapping["none"] is None
    assert pair.names == ["a", "b", "c"]
    assert pair.x.shape == (3,)
    assert pair.temperature == 2.0


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ({"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}, r"batch\['x'\] has the shapes \(2, 3\), \(2, 4\)"),
        ({"x": 1}, {"y": 1}, "other keys"),
        ((torch.ones(1), 1), (torch.ones(1), 2), r"batch\[1\] is 1 in one"),
        ((1,), (1, 2), "1, 2 members"),
        (torch.ones(1), [1], "is Tensor here and list there|is list here and Tensor there"),
        (torch.tensor(1.0), torch.tensor(2.0), "no dimensions"),
    ],
)
def test_what_cannot_be_joined_asks_for_the_big_batch(one: Any, two: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words) as caught:
        joined([one, two])
    assert "big=" in caught.value.fix


def test_ragged_lengths_take_a_big_batch_padded_by_the_user() -> None:
    short, long = ragged(6, length=4)[0], ragged(9, length=5, seed=1)[0]
    padded = {
        "x": torch.cat([F.pad(short["x"], (0, 0, 0, 1)), long["x"]]),
        "labels": torch.cat([F.pad(short["labels"], (0, 1), value=-100), long["labels"]]),
    }
    assert_same_update(network(), mean_loss, [short, long], live, big=padded)


@pytest.mark.parametrize(
    ("loss_fn", "batches", "settings", "error"),
    [
        (mean_loss, [], {}, PolicyError),
        (mean_loss, ragged(1, 1), {"reduction": "none"}, PolicyError),
        (mean_loss, ragged(1, 1), {"reduction": "sum", "weight": live}, PolicyError),
        (mean_loss, ragged(1, 1), {"weight": lambda batch: -1.0}, PolicyError),
        (mean_loss, ragged(0, 0), {"weight": live}, MisuseError),
        (lambda model, batch: model(batch["x"]), ragged(1, 1), {}, MisuseError),
        (lambda model, batch: torch.zeros(()), ragged(1, 1), {}, MisuseError),
    ],
)
def test_misuse_is_an_error_of_halfsteps_own(
    loss_fn: Any, batches: list[Batch], settings: dict[str, Any], error: type[HalfstepError]
) -> None:
    with pytest.raises(error) as caught:
        assert_same_update(network(), loss_fn, batches, **settings)
    assert caught.value.fix


def test_arguments_that_cannot_be_meant() -> None:
    model, batches = nn.Linear(2, 1), [torch.ones(2, 2)] * 2

    def loss_fn(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    wrong: list[tuple[Any, type[HalfstepError], str]] = [
        (lambda: assert_same_update(loss_fn, model, batches), MisuseError, "other way round"),
        (lambda: assert_same_update(None, loss_fn, batches), MisuseError, "the model is a NoneType"),
        (lambda: assert_same_update(model, loss_fn, batches, "labels"), PolicyError, "weight='labels'"),
        (lambda: assert_same_update(model, loss_fn, batches, 4), PolicyError, "weight=4"),
        (lambda: assert_same_update(model, loss_fn, batches, tolerance=-1), PolicyError, "tolerance=-1"),
        (lambda: assert_same_update(model, loss_fn, batches, tolerance=math.nan), PolicyError, "tolerance=nan"),
        (lambda: assert_same_update(model, loss_fn, batches, tolerance="1"), PolicyError, "tolerance='1'"),
    ]
    for call, error, words in wrong:
        with pytest.raises(error, match=words) as caught:
            call()
        assert caught.value.fix
    assert assert_same_update(model, loss_fn, batches, tolerance=0.5)
