"""Torch's own losses: each against its elements, written out in FP64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from halfstep.weigh import weigh

from .reference import agrees, expected, one, weighed

N, C = 6, 5
torch.manual_seed(3)
LOGITS = torch.randn(N, C)
TARGET = torch.tensor([0, 3, -100, 4, -100, 1])
LIVE = TARGET != -100
SAFE = TARGET.clamp(min=0)
ROWS = torch.arange(N)
SOFT = torch.rand(N, C).softmax(-1)
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
VALUES = torch.rand(N, C)
HALF = (VALUES > 0.4).float()


def fresh() -> torch.Tensor:
    return LOGITS.clone().requires_grad_() * 1.0


def nll() -> torch.Tensor:
    return -LOGITS.double().log_softmax(-1)[ROWS, SAFE]


def masked_mean(e: torch.Tensor) -> torch.Tensor:
    return (e * LIVE).sum() / LIVE.sum()


def test_a_mean_over_targets_that_count() -> None:
    loss = F.cross_entropy(fresh(), TARGET)
    want = expected(nll(), masked_mean, LIVE)
    assert loss.item() == pytest.approx(masked_mean(nll()).item(), rel=1e-6)
    term = one(loss)
    agrees(term, want)
    assert (term.loss, term.reduction, term.positions, term.targets) == ("cross_entropy", "mean", N, N)
    assert (term.weight_sum, term.divisor, term.soft) == (4.0, 4.0, False)


def test_a_sum_divided_by_hand() -> None:
    loss = F.cross_entropy(fresh(), TARGET, reduction="sum") / 7
    term = one(loss)
    agrees(term, expected(nll(), lambda e: (e * LIVE).sum() / 7, LIVE))
    assert term.reduction == "sum"
    assert term.divisor == pytest.approx(7)


def test_no_reduction_then_a_mean_counts_ignored_positions() -> None:
    loss = F.cross_entropy(fresh(), TARGET, reduction="none").mean()
    term = one(loss)
    agrees(term, expected(nll(), torch.mean, LIVE))
    assert term.total == pytest.approx(4 / 6)
    assert term.ignored_share == pytest.approx(1 / 3)
    assert term.divisor == pytest.approx(6)


def test_a_sum_over_every_position_divided_by_the_right_count_harms_nothing() -> None:
    term = one(F.cross_entropy(fresh(), TARGET, reduction="none").sum() / LIVE.sum())
    assert term.total == pytest.approx(1)
    assert term.ignored_share == pytest.approx(1 / 3)  # their losses are zero: the share is there and does nothing


MASK = torch.tensor([True, True, False, False, True, True])
BOTH = MASK & LIVE


@pytest.mark.parametrize(
    ("reduce", "live"),
    [
        (lambda e: (e * MASK).sum() / MASK.sum(), LIVE & MASK),
        (lambda e: e[MASK].mean(), LIVE & MASK),
        (lambda e: (e * BOTH).sum() / BOTH.sum(), BOTH),
        (lambda e: torch.where(BOTH, e, 0.0).sum() / BOTH.sum(), BOTH),
        (lambda e: e.masked_fill(~BOTH, 0.0).sum() / BOTH.sum(), BOTH),
        (lambda e: e.masked_select(BOTH).mean(), BOTH),
        (lambda e: (e * BOTH).mean(), BOTH),
        (lambda e: torch.dot(e, BOTH.to(e.dtype)) / BOTH.sum(), BOTH),
        (lambda e: ((e * BOTH).view(2, 3).sum(1) / BOTH.view(2, 3).sum(1)).mean(), BOTH),
        (lambda e: (e * BOTH).view(2, 3).mean(dim=(0, 1)), BOTH),
        (lambda e: e[BOTH].topk(2).values.mean(), None),
        (lambda e: torch.nanmean(torch.where(BOTH, e, torch.nan)), BOTH),
        (lambda e: e.clone().index_put_((~BOTH,), torch.zeros((), dtype=e.dtype)).sum() / BOTH.sum(), BOTH),
        (lambda e: torch.cat([e[:2], e[4:]]).mean(), BOTH),
        (lambda e: sum(part.sum() for part in e.split(2)) / 4, LIVE),
        (lambda e: torch.zeros(2, dtype=e.dtype).index_add(0, ROWS % 2, e * BOTH).sum() / 3, BOTH),
        (lambda e: (e[:3].sum() + e[3:].sum()) / 5, LIVE),
    ],
)
def test_masks(reduce, live) -> None:  # type: ignore[no-untyped-def]
    loss = reduce(F.cross_entropy(fresh(), TARGET, reduction="none"))
    truth = torch.where(LIVE, nll(), 0)
    assert loss.item() == pytest.approx(reduce(truth).item(), rel=1e-6)
    want = expected(truth, reduce, live)
    agrees(one(loss), want)


def test_a_vector_loss_with_its_own_gradient() -> None:
    loss = F.cross_entropy(fresh(), TARGET, reduction="none")
    weighing = weigh(loss)
    loss.backward(BOTH / BOTH.sum())
    (term,) = weighing.read()
    agrees(term, expected(nll(), lambda e: (e * BOTH).sum() / BOTH.sum(), BOTH))


def test_class_weights() -> None:
    weights = CLASS_WEIGHT[SAFE].double()
    whole = (weights * LIVE).sum().item()
    for loss in (
        F.cross_entropy(fresh(), TARGET, weight=CLASS_WEIGHT),
        F.cross_entropy(fresh(), TARGET, weight=CLASS_WEIGHT, reduction="sum") / whole,
        F.cross_entropy(fresh(), TARGET, weight=CLASS_WEIGHT, reduction="none").sum() / whole,
        F.cross_entropy(fresh(), TARGET, weight=CLASS_WEIGHT, reduction="none")[LIVE].sum() / whole,
    ):
        want = expected(nll(), lambda e: (weights * e * LIVE).sum() / whole, LIVE)
        assert loss.item() == pytest.approx(((weights * nll() * LIVE).sum() / whole).item(), rel=1e-6)
        term = one(loss)
        assert term.total == pytest.approx(want.total, rel=1e-6)
        assert term.supervised == 4
        assert term.weight_sum == pytest.approx(whole, rel=1e-6)
        assert term.divisor == pytest.approx(whole, rel=1e-6)
        assert term.spread == pytest.approx(0, abs=1e-6)  # class weights belong to the element's loss


def test_segmentation() -> None:
    logits = torch.randn(2, C, 3, 4, requires_grad=True)
    target = torch.randint(0, C, (2, 3, 4))
    target[0, 1] = 255
    term = one(F.cross_entropy(logits, target, ignore_index=255))
    assert (term.positions, term.supervised, term.targets) == (24, 20, 2)
    assert term.total == pytest.approx(1)
    term = one(F.cross_entropy(logits, target, ignore_index=255, reduction="none").mean())
    assert (term.supervised, term.ignored_share) == (20, pytest.approx(4 / 24))
    assert term.total == pytest.approx(20 / 24)
    per_image = F.cross_entropy(logits, target, ignore_index=255, reduction="none").flatten(1)
    live = (target != 255).flatten(1)
    term = one((per_image.sum(1) / live.sum(1)).mean())
    assert (term.supervised, term.total) == (20, pytest.approx(1))
    assert term.spread == pytest.approx((1 / 16 - 1 / 24) / (1 / 20))


def test_a_sequence_of_log_probabilities_with_three_dimensions() -> None:
    logits = torch.randn(2, C, 3, requires_grad=True)
    target = torch.tensor([[0, 1, -100], [2, -100, -100]])
    term = one(F.cross_entropy(logits, target))
    assert (term.loss, term.positions, term.supervised, term.total) == ("cross_entropy", 6, 3, 1.0)


EPSILON = 0.2


def smoothed() -> torch.Tensor:
    log_p = LOGITS.double().log_softmax(-1)
    return (1 - EPSILON) * nll() - EPSILON / C * log_p.sum(-1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_label_smoothing_is_one_term(reduction: str) -> None:
    loss = F.cross_entropy(fresh(), TARGET, label_smoothing=EPSILON, reduction=reduction)
    loss = loss if reduction == "mean" else loss.sum() / LIVE.sum()
    assert loss.item() == pytest.approx(masked_mean(smoothed()).item(), rel=1e-6)
    term = one(loss * 3)
    want = expected(smoothed(), lambda e: 3 * masked_mean(e), LIVE)
    assert term.total == pytest.approx(want.total, rel=1e-6)
    assert (term.supervised, term.soft, term.loss) == (4, True, "cross_entropy")
    assert term.spread == pytest.approx(0, abs=1e-6)


def test_label_smoothing_with_class_weights_adds_to_one() -> None:
    term = one(F.cross_entropy(fresh(), TARGET, label_smoothing=EPSILON, weight=CLASS_WEIGHT))
    assert term.total == pytest.approx(1, rel=1e-6)
    assert term.supervised == 4


@pytest.mark.parametrize("as_mean", [True, False])
def test_label_smoothing_by_hand_is_one_term(as_mean: bool) -> None:
    log_p = fresh().log_softmax(-1)
    chosen = -log_p.gather(-1, SAFE[:, None]).squeeze(-1)
    even = -log_p.mean(-1) if as_mean else -log_p.sum(-1) / C
    term = one((((1 - EPSILON) * chosen + EPSILON * even) * LIVE).sum() / LIVE.sum())
    agrees(term, expected(smoothed(), masked_mean, LIVE))
    assert term.soft


def test_mixup_is_one_term_of_two_targets() -> None:
    logits = fresh()
    term = one(0.3 * F.cross_entropy(logits, SAFE) + 0.7 * F.cross_entropy(logits, SAFE.flip(0)))
    assert (term.total, term.supervised, term.soft) == (pytest.approx(1), N, True)


def test_two_losses_on_the_same_logits_with_their_own_counts_stay_apart() -> None:
    logits = fresh()
    _, terms = weighed(F.cross_entropy(logits, TARGET) + 0.1 * F.cross_entropy(logits, torch.where(LIVE, -100, 1)))
    assert [(term.supervised, term.total) for term in terms] == [(4, 1.0), (2, pytest.approx(0.1))]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_soft_targets(reduction: str) -> None:
    loss = F.cross_entropy(fresh(), SOFT, reduction=reduction)
    loss = loss.mean() if reduction == "none" else loss / (N if reduction == "sum" else 1)
    elements = -(SOFT * LOGITS.double().log_softmax(-1)).sum(-1)
    assert loss.item() == pytest.approx(elements.mean().item(), rel=1e-6)
    term = one(loss / 4)
    agrees(term, expected(elements, lambda e: e.mean() / 4))
    assert (term.loss, term.soft, term.positions, term.parts) == ("cross_entropy", True, N, 1)


def test_soft_targets_with_class_weights() -> None:
    term = one(F.cross_entropy(fresh(), SOFT, weight=CLASS_WEIGHT))
    heavy = (SOFT * CLASS_WEIGHT).sum().item()
    assert term.weight_sum == pytest.approx(heavy, rel=1e-6)
    assert term.total == pytest.approx(heavy / N, rel=1e-6)  # torch divides by the examples, not by the weights
    assert term.divisor == pytest.approx(N, rel=1e-6)
    assert term.spread == pytest.approx(0, abs=1e-6)


def test_kl_divergence() -> None:
    elements = (SOFT * (SOFT.log() - LOGITS.double().log_softmax(-1))).sum(-1)
    by_batch = F.kl_div(fresh().log_softmax(-1), SOFT, reduction="batchmean")
    assert by_batch.item() == pytest.approx(elements.mean().item(), rel=1e-5)
    term = one(by_batch)
    agrees(term, expected(elements, torch.mean))
    assert (term.loss, term.soft) == ("kl_div", True)
    logs = F.kl_div(fresh().log_softmax(-1), SOFT.log(), reduction="batchmean", log_target=True)
    agrees(one(logs), expected(elements, torch.mean))
    by_row = F.kl_div(fresh().log_softmax(-1), SOFT, reduction="none").sum(-1)
    agrees(one(masked_mean(by_row)), expected(elements, masked_mean, LIVE))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.mse_loss, "mse"),
        (F.l1_loss, "l1"),
        (F.huber_loss, "huber"),
        (F.smooth_l1_loss, "smooth_l1"),
        (F.binary_cross_entropy_with_logits, "bce_with_logits"),
        (lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y, **how), "bce"),
        (lambda x, y, **how: F.soft_margin_loss(x, y.sign() * 2 - 1, **how), "soft_margin"),
    ],
)
def test_element_by_element(function, name: str) -> None:  # type: ignore[no-untyped-def]
    elements = function(LOGITS.double(), VALUES.double(), reduction="none")
    rows = HALF.sum(1)
    reductions = {
        "mean": lambda e: e.mean() / 4,
        "sum": lambda e: e.sum() / 11,
        "none": lambda e: (e * HALF).sum() / HALF.sum(),
    }
    for reduction, reduce in reductions.items():
        loss = function(fresh(), VALUES, reduction=reduction)
        loss = reduce(loss) if reduction == "none" else loss / (4 if reduction == "mean" else 11)
        assert loss.item() == pytest.approx(reduce(elements).item(), rel=1e-5)
        term = one(loss)
        agrees(term, expected(elements, reduce))
        assert term.loss == name
        assert (term.positions, term.targets) == (N * C, N)
    by_rows = one(((function(fresh(), VALUES, reduction="none") * HALF).sum(1) / rows).mean())
    agrees(by_rows, expected(elements, lambda e: ((e * HALF).sum(1) / rows).mean()))


def test_bce_with_a_mask_as_weight() -> None:
    elements = F.binary_cross_entropy_with_logits(LOGITS.double(), VALUES.double(), reduction="none")
    live = HALF.bool()
    mean = one(F.binary_cross_entropy_with_logits(fresh(), VALUES, weight=HALF))
    agrees(mean, expected(elements, torch.mean, live))
    assert mean.ignored_share == pytest.approx(1 - HALF.mean().item())
    assert mean.divisor == N * C
    right = one(F.binary_cross_entropy_with_logits(fresh(), VALUES, weight=HALF, reduction="none").sum() / HALF.sum())
    assert right.total == pytest.approx(1)
    assert right.supervised == int(HALF.sum())


def test_bce_with_weights_of_classes() -> None:
    term = one(
        F.binary_cross_entropy_with_logits(fresh(), VALUES, weight=CLASS_WEIGHT, pos_weight=CLASS_WEIGHT),
    )
    assert (term.total, term.supervised, term.ignored_share) == (pytest.approx(1), N * C, 0)
    assert term.weight_sum == pytest.approx(CLASS_WEIGHT.sum().item() * N)


def test_multi_margin() -> None:
    term = one(F.multi_margin_loss(fresh(), SAFE) / 2)
    assert (term.loss, term.positions, term.supervised) == ("multi_margin", N, N)
    assert term.total == pytest.approx(0.5)
    term = one(F.multi_margin_loss(fresh(), SAFE, weight=CLASS_WEIGHT))
    assert (term.weight_sum, term.total) == (None, 1.0)
    term = one(F.multilabel_margin_loss(fresh(), torch.zeros(N, C, dtype=torch.long)))
    assert (term.loss, term.positions, term.total) == ("multilabel_margin", N, 1.0)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_ctc(as_tensor: bool) -> None:
    scores = torch.randn(7, 2, C, requires_grad=True)
    labels = torch.randint(1, C, (2, 3))
    sizes = [3, 2]
    lengths: object = torch.tensor(sizes) if as_tensor else tuple(sizes)
    inputs: object = torch.tensor([7, 7]) if as_tensor else (7, 7)

    def ctc(reduction: str) -> torch.Tensor:
        return F.ctc_loss(scores.log_softmax(-1), labels, inputs, lengths, reduction=reduction)

    mean = one(ctc("mean"))
    assert (mean.loss, mean.supervised, mean.total, mean.spread) == ("ctc", 2, pytest.approx(1), 0)
    by_label = one(ctc("sum") / 5)
    assert (by_label.weight_sum, by_label.divisor) == (5, pytest.approx(5))
    assert by_label.total == pytest.approx(1)
    masked = one((ctc("none") * torch.tensor([1.0, 0.0])).sum() / 3)
    assert (masked.supervised, masked.weight_sum) == (1, 3)
    assert masked.total == pytest.approx(1)


def test_nothing_supervised() -> None:
    empty = one(F.cross_entropy(fresh(), torch.full((N,), -100)))
    assert (empty.supervised, empty.weight_sum, empty.divisor) == (0, 0.0, None)
    assert math.isnan(empty.total)
    assert math.isnan(empty.coefficient)
    for loss in (
        F.cross_entropy(fresh(), TARGET, reduction="none")[torch.zeros(N, dtype=torch.bool)].mean(),
        (F.cross_entropy(fresh(), TARGET, reduction="none") * 0).sum() / torch.tensor(0.0),
        ((fresh() - VALUES) ** 2 * 0).sum() / torch.tensor(0.0),
        F.mse_loss(fresh()[:0], VALUES[:0]),
    ):
        term = one(loss)
        assert term.supervised == 0
        assert math.isnan(term.total)
    guarded = one((F.cross_entropy(fresh(), TARGET, reduction="none") * 0).sum() / 1)
    assert (guarded.supervised, guarded.total) == (0, 0.0)


def test_half_precision_logits_are_counted_exactly() -> None:
    """A weight sum kept in the logits' BF16 would say 304 for 301."""
    logits = torch.randn(400, 3, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(400, dtype=torch.long)
    target[301:] = -100
    term = one(F.cross_entropy(logits, target))
    assert (term.supervised, term.total, term.coefficient) == (301, 1.0, 1 / 301)


def test_under_autocast() -> None:
    layer = torch.nn.Linear(C, C)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(LOGITS)
        loss = F.cross_entropy(out, TARGET) + F.mse_loss(out, VALUES)
    weighing, terms = weighed(loss * 1024 / 4)
    assert weighing.opaque is None
    assert [(term.loss, term.total, term.supervised) for term in terms] == [("cross_entropy", 256, 4), ("mse", 256, 30)]
