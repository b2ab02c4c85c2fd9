"""Losses as users write them by hand, and losses of several terms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .reference import agrees, expected, one, weighed

torch.manual_seed(5)
B, T, V = 3, 4, 6
PREDICTION = torch.randn(B, T)
VALUES = torch.randn(B, T)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).float()
LOGITS = torch.randn(B, T, V)
LABELS = torch.randint(0, V, (B, T))


def prediction() -> torch.Tensor:
    return PREDICTION.clone().requires_grad_() * 1.0


def logits() -> torch.Tensor:
    return LOGITS.clone().requires_grad_() * 1.0


def chosen() -> torch.Tensor:
    return -LOGITS.double().log_softmax(-1).gather(-1, LABELS[..., None]).squeeze(-1)


ERRORS = (PREDICTION - VALUES).double()


@pytest.mark.parametrize(
    ("loss", "elements", "reduce", "name"),
    [
        (lambda x: (x - VALUES).pow(2).mean(), ERRORS**2, torch.mean, "mse"),
        (lambda x: ((x - VALUES) ** 2 * MASK).sum() / MASK.sum(), ERRORS**2, "masked", "mse"),
        (lambda x: 0.5 * ((x - VALUES).square() * MASK).sum() / MASK.sum(), ERRORS**2, "half", "mse"),
        (lambda x: (((x - VALUES) * (x - VALUES)) * MASK).sum() / MASK.sum(), ERRORS**2, "masked", "elementwise"),
        (lambda x: (lambda d: (d * d).mean())(x - VALUES), ERRORS**2, torch.mean, "mse"),
        (lambda x: (x - VALUES).abs().mean(), ERRORS.abs(), torch.mean, "l1"),
        (lambda x: ((x - VALUES).abs() * MASK).sum(1).div(MASK.sum(1)).mean(), ERRORS.abs(), "rows", "l1"),
        (lambda x: (x - VALUES).pow(2)[MASK.bool()].float().mean(), ERRORS**2, "masked", "mse"),
        (lambda x: torch.log(torch.cosh(x - VALUES)).mean(), ERRORS.cosh().log(), torch.mean, "elementwise"),
        (lambda x: F.triplet_margin_loss(x, x * 2, VALUES, margin=50), torch.ones(B), torch.mean, "elementwise"),
        (lambda x: F.relu(1 - x * VALUES.sign()).mean(), ERRORS, torch.mean, "elementwise"),
        (lambda x: -x.sigmoid().log().mean(), ERRORS, torch.mean, "elementwise"),
        (lambda x: F.poisson_nll_loss(x, VALUES.abs()), ERRORS, torch.mean, "elementwise"),
        (lambda x: F.multilabel_soft_margin_loss(x, MASK), ERRORS, torch.mean, "elementwise"),
    ],
)  # fmt: skip
def test_elements(loss, elements, reduce, name: str) -> None:  # type: ignore[no-untyped-def]
    by_name = {
        "masked": lambda e: (e * MASK).sum() / MASK.sum(),
        "half": lambda e: 0.5 * (e * MASK).sum() / MASK.sum(),
        "rows": lambda e: ((e * MASK).sum(1) / MASK.sum(1)).mean(),
    }
    term = one(loss(prediction()))
    agrees(term, expected(elements, by_name.get(reduce, reduce) if isinstance(reduce, str) else reduce))
    assert (term.loss, term.positions) == (name, elements.numel())


@pytest.mark.parametrize(
    "loss",
    [
        lambda p: -(p.gather(-1, LABELS[..., None]).squeeze(-1) * MASK).sum() / MASK.sum(),
        lambda p: -(p.gather(2, LABELS.unsqueeze(2))[:, :, 0] * MASK).sum() / MASK.sum(),
        lambda p: -p.gather(-1, LABELS[..., None]).squeeze(-1)[MASK.bool()].mean(),
        lambda p: -(p.view(-1, V)[torch.arange(B * T), LABELS.view(-1)] * MASK.view(-1)).sum() / MASK.sum(),
        lambda p: -((p * F.one_hot(LABELS, V)).sum(-1) * MASK).sum() / MASK.sum(),
        lambda p: -(p * F.one_hot(LABELS, V) * MASK[..., None]).sum() / MASK.sum(),
        lambda p: (F.nll_loss(p.view(-1, V), LABELS.view(-1), reduction="none") * MASK.view(-1)).sum() / MASK.sum(),
        lambda p: F.nll_loss(p.transpose(1, 2), LABELS.masked_fill(MASK == 0, -100)),
    ],
)
def test_log_probabilities(loss) -> None:  # type: ignore[no-untyped-def]
    value = loss(logits().log_softmax(-1))
    want = (chosen() * MASK).sum() / MASK.sum()
    assert value.item() == pytest.approx(want.item(), rel=1e-6)
    term = one(value)
    agrees(term, expected(chosen(), lambda e: (e * MASK).sum() / MASK.sum()))
    assert term.positions == B * T
    assert term.loss in ("nll", "cross_entropy")


def test_means_of_means_over_sequences_spread() -> None:
    log_p = logits().log_softmax(-1)
    token = -log_p.gather(-1, LABELS[..., None]).squeeze(-1)
    term = one(((token * MASK).sum(1) / MASK.sum(1)).mean())
    agrees(term, expected(chosen(), lambda e: ((e * MASK).sum(1) / MASK.sum(1)).mean()))
    assert term.spread == pytest.approx((1 / 3 - 1 / 12) / (1 / 7))


def test_features_folded_into_one_example() -> None:
    term = one((prediction() - VALUES).pow(2).sum(-1).mean())
    assert (term.total, term.parts) == (pytest.approx(T), T)
    half = one(0.5 * (prediction() - VALUES).pow(2).sum(dim=1).mean())
    assert (half.total, half.parts) == (pytest.approx(T / 2), T)
    by_hand = one(((prediction() - VALUES).pow(2).sum(-1) / T).mean())
    assert (by_hand.total, by_hand.parts) == (pytest.approx(1), 1)
    counted = one((((prediction() - VALUES).pow(2) * MASK).sum(-1) / MASK.sum(-1)).mean())
    assert (counted.total, counted.parts) == (pytest.approx(1), 1)
    stacked = one(torch.stack([((prediction() - VALUES).pow(2)).sum()]).mean())
    assert (stacked.total, stacked.parts) == (pytest.approx(B * T), B * T)


def test_masks_are_told_from_data_by_their_values() -> None:
    """A product with constants of one value (and zeros) masks what it multiplies; with any others it is the loss."""
    for mask in (MASK, MASK.bool(), MASK.int(), MASK / MASK.sum()):
        term = one((prediction().sigmoid().log() * mask).sum())
        agrees(term, expected(ERRORS, lambda e, m=mask: (e * m).sum()))
        assert term.positions == B * T
    advantage = torch.tensor([[1.0, -2, 0.5, 3], [0.1, 1, 0, 0], [2, 0, 0, 0]])
    term = one(-(prediction().sigmoid().log() * advantage).mean())
    agrees(term, expected(ERRORS, torch.mean))
    term = one((1 - F.cosine_similarity(prediction(), VALUES)).mean())
    assert (term.supervised, term.spread, term.parts) == (B * T, 0, T)
    assert term.total == pytest.approx(T)


def test_a_policy_gradient_is_called_one() -> None:
    advantage = torch.tensor([1.0, -2, 0.5]).repeat(4)
    log_p = logits().view(-1, V).log_softmax(-1)
    taken = log_p.gather(-1, LABELS.view(-1, 1)).squeeze(-1)
    assert one(-(taken * advantage).mean()).loss == "policy_gradient"

    def token() -> torch.Tensor:
        return F.cross_entropy(logits().view(-1, V), LABELS.view(-1), reduction="none")

    assert one((token() * advantage).mean()).loss == "policy_gradient"
    weighted = one((token() * advantage.abs()).sum() / advantage.abs().sum())
    assert (weighted.loss, weighted.total) == ("cross_entropy", pytest.approx(1))


def test_several_terms_keep_their_own_coefficients() -> None:
    x, out = prediction(), logits()
    loss = F.cross_entropy(out.flatten(0, 1), LABELS.flatten()) + 0.25 * F.mse_loss(x, VALUES) - 2 * x.abs().mean()
    weighing, terms = weighed(loss * 8)
    assert weighing.opaque is None
    assert [(t.loss, pytest.approx(t.total)) for t in terms] == [("cross_entropy", 8), ("mse", 2), ("elementwise", 16)]


def test_terms_added_element_by_element() -> None:
    out = logits()
    token = F.cross_entropy(out.flatten(0, 1), LABELS.flatten(), reduction="none")
    soft = F.kl_div(out.log_softmax(-1), LOGITS.flip(-1).softmax(-1), reduction="none").sum(-1).flatten()
    mask = MASK.flatten()
    _, terms = weighed(((token + 0.5 * soft) * mask).sum() / mask.sum())
    assert [t.loss for t in terms] == ["cross_entropy", "kl_div"]
    assert [t.total for t in terms] == [pytest.approx(1), pytest.approx(0.5)]
    assert [t.supervised for t in terms] == [7, 7]


@pytest.mark.parametrize(
    "join",
    [
        lambda losses: torch.stack(losses).mean(),
        lambda losses: sum(losses) / len(losses),
        lambda losses: torch.cat([loss[None] for loss in losses]).mean(),
        lambda losses: sum(loss / len(losses) for loss in losses),
        lambda losses: torch.stack(losses).sum() / torch.tensor(3.0),
        lambda losses: (torch.stack(losses) * torch.tensor([1.0, 1.0, 1.0])).mean(),
    ],
)
def test_several_micro_batches_in_one_backward(join) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(V, V)
    losses = [F.cross_entropy(model(LOGITS[b]), LABELS[b].masked_fill(MASK[b] == 0, -100)) for b in range(B)]
    weighing, terms = weighed(join(losses))
    assert weighing.opaque is None
    assert [t.supervised for t in terms] == [4, 2, 1]
    assert [t.total for t in terms] == [pytest.approx(1 / 3)] * 3


def test_losses_written_one_by_one_into_a_tensor() -> None:
    model, losses = nn.Linear(V, V), torch.zeros(B)
    for b in range(B):
        losses[b] = F.cross_entropy(model(LOGITS[b]), LABELS[b])
    weighing, terms = weighed(losses.mean())
    assert weighing.opaque is None
    assert sorted(t.total for t in terms) == [pytest.approx(1 / 3)] * 3


def test_the_same_elements_reduced_twice_are_one_term() -> None:
    error = (prediction() - VALUES).pow(2)
    agrees(one(error.mean() + 0.5 * error.sum()), expected(ERRORS**2, lambda e: e.mean() + 0.5 * e.sum()))


def test_a_penalty_is_called_one() -> None:
    model = nn.Linear(T, T)
    x = model(PREDICTION)
    decay = sum(p.pow(2).sum() for p in model.parameters())
    norms = sum(p.norm() for p in model.parameters())
    sparse = model.weight.abs().mean()
    loss = 0.01 * decay + F.mse_loss(x, VALUES) + 1e-3 * norms + sparse + (model.bias * model.bias).sum()
    weighing, terms = weighed(loss)
    assert weighing.opaque is None
    assert sorted(t.loss for t in terms) == ["mse"] + ["penalty"] * 6


def test_a_long_penalty_does_not_hide_the_loss() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(100)]
    weighing, terms = weighed(sum(w.pow(2).sum() for w in weights) + F.mse_loss(prediction(), VALUES))
    assert weighing.opaque == "budget of 64 nodes"
    assert terms[-1].loss == "mse"


def test_a_linear_model_on_data_is_no_penalty() -> None:
    w = nn.Parameter(torch.randn(T))
    term = one((w * PREDICTION).mean())
    assert (term.loss, term.positions, term.total) == ("elementwise", B * T, pytest.approx(1))
    term = one((PREDICTION @ w - VALUES[:, 0]).pow(2).mean())
    assert (term.loss, term.positions) == ("mse", B)


def test_learned_weights_of_losses() -> None:
    s = nn.Parameter(torch.tensor([0.3, -0.2]))
    x = prediction()
    loss = F.mse_loss(x, VALUES) * torch.exp(-s[0]) + s[0] + x.tanh().abs().mean() / s[1].exp() + s[1]
    weighing, terms = weighed(loss)
    assert weighing.opaque is None
    assert [t.loss for t in terms if t.loss != "penalty"] == ["mse", "elementwise"]
    assert terms[0].total == pytest.approx(torch.tensor(-0.3).exp().item())


def test_residual_sums_inside_a_model_are_not_taken_for_terms() -> None:
    a, b = nn.Linear(T, T), nn.Linear(T, T)
    hidden = a(PREDICTION)
    hidden = hidden + b(hidden)
    term = one(hidden.mean())
    assert (term.loss, term.positions, term.total) == ("elementwise", B * T, pytest.approx(1))


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 65536.0, -2.0])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_factors(factor: float, as_tensor: bool) -> None:
    value = torch.tensor(factor) if as_tensor else factor
    want = expected(ERRORS**2, lambda e: e.mean() * factor)
    agrees(one(value * F.mse_loss(prediction(), VALUES)), want)
    agrees(one(F.mse_loss(prediction(), VALUES).double().float().view(1).squeeze() * value), want)
    agrees(one(F.mse_loss(prediction(), VALUES) / (1 / value)), want)


@pytest.mark.parametrize(
    ("loss", "live"),
    [
        (lambda x: F.mse_loss(x * MASK, VALUES * MASK), MASK.sum()),
        (lambda x: ((x * MASK - VALUES * MASK) ** 2).mean(), MASK.sum()),
        (lambda x: ((x - VALUES) * MASK).abs().mean(), MASK.sum()),
        (lambda x: F.huber_loss(x.masked_fill(MASK == 0, 0.0), VALUES * MASK).div(2), MASK.sum()),
        (lambda x: F.smooth_l1_loss((x * MASK).flatten(), (VALUES * MASK).flatten()), MASK.sum()),
        (lambda x: torch.where(MASK > 0, x - VALUES, torch.zeros(())).pow(2).mean(), MASK.sum()),
        (lambda x: F.mse_loss(x * MASK, VALUES), None),  # a mask on one side: dropout
        (lambda x: ((x - VALUES) * (1 + MASK)).pow(2).mean(), None),  # weights
        (lambda x: F.mse_loss(x * 0.5, VALUES), None),
        (lambda x: F.mse_loss(x, VALUES), None),
    ],
)
def test_what_a_mask_on_a_losss_inputs_leaves(loss, live) -> None:  # type: ignore[no-untyped-def]
    term = one(loss(prediction()))
    assert term.live == (None if live is None else int(live))
    assert term.supervised == term.positions == B * T


def test_masked_advantages_of_both_signs_are_a_policy_gradient() -> None:
    values = torch.tensor([[0.5], [-1.0], [2.0]])

    def objective(x: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        ratio = x.exp()
        return (torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * MASK).sum() / MASK.numel()

    assert one(objective(prediction(), values)).loss == "policy_gradient"
    assert one(objective(prediction(), values.abs())).loss == "elementwise"
