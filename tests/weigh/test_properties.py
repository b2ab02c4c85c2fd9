"""Any shape, mask, reduction and factor: the coefficients are those of the reduction written out in FP64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.weigh import Term

from .reference import agrees, expected, one, weighed

REDUCTIONS = {
    "mean over counted": lambda e, m: (e * m).sum() / m.sum(),
    "mean over all": lambda e, m: (e * m).mean(),
    "sum": lambda e, m: (e * m).sum(),
    "chosen": lambda e, m: e[m.bool()].mean(),
    "rows": lambda e, m: ((e * m).sum(-1) / m.sum(-1).clamp(min=1)).mean(),
    "where": lambda e, m: torch.where(m.bool(), e, 0.0).sum() / m.sum(),
    "weighted rows": lambda e, m: (e * m / m.sum(-1, keepdim=True).clamp(min=1)).sum() / e.shape[0],
}
FACTORS = st.sampled_from([1.0, 0.25, 1 / 3, 1024.0, 65536.0])
sizes = st.integers(1, 5)


def by_hand(elements: torch.Tensor, reduce, factor: float, live: torch.Tensor):  # type: ignore[no-untyped-def]
    return expected(elements, lambda e: reduce(e) * factor, live)


@settings(max_examples=80, deadline=None)
@given(st.data(), sizes, sizes, st.sampled_from(sorted(REDUCTIONS)), FACTORS, st.booleans())
def test_masked_elements(data, rows: int, columns: int, name: str, factor: float, wide: bool) -> None:  # type: ignore[no-untyped-def]
    flags = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns).filter(any))
    kind = data.draw(st.sampled_from(["mse", "squares", "bce", "cross_entropy", "gather", "huber"]))
    mask = torch.tensor(flags).view(rows, columns).float()
    torch.manual_seed(rows * 31 + columns)
    dtype = torch.float64 if wide else torch.float32
    scores = torch.randn(rows, columns, 3, dtype=dtype, requires_grad=True)
    x, y = scores[..., 0], torch.rand(rows, columns, dtype=dtype)
    labels = torch.randint(0, 3, (rows, columns))
    elements = {
        "mse": lambda: F.mse_loss(x, y, reduction="none"),
        "squares": lambda: (x - y) ** 2,
        "bce": lambda: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        "cross_entropy": lambda: F.cross_entropy(scores.transpose(1, 2), labels, reduction="none"),
        "gather": lambda: -scores.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1),
        "huber": lambda: F.huber_loss(x, y, reduction="none"),
    }[kind]()
    reduce = REDUCTIONS[name]
    term = one(reduce(elements, mask.to(dtype)) * factor)
    want = by_hand(elements, lambda e: reduce(e, mask.double()), factor, mask)
    agrees(term, want, 1e-12 if wide else 1e-5)
    assert term.positions == rows * columns
    assert term.targets == rows


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, -100]), min_size=1, max_size=12),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.1]),
    FACTORS,
)
def test_cross_entropy(labels: list[int], reduction: str, smoothing: float, factor: float) -> None:
    target = torch.tensor(labels)
    live = target != -100
    torch.manual_seed(len(labels))
    logits = torch.randn(len(labels), 3, requires_grad=True)
    loss = F.cross_entropy(logits * 1, target, reduction=reduction, label_smoothing=smoothing)
    loss = loss.mean() if reduction == "none" else loss
    term = one(loss * factor)
    assert (term.positions, term.supervised) == (len(labels), int(live.sum()))
    if not live.any():
        assert math.isnan(term.total) if reduction == "mean" else term.total == 0
        return
    reduce = {
        "mean": lambda e: (e * live).sum() / live.sum(),
        "sum": lambda e: (e * live).sum(),
        "none": lambda e: e.mean(),
    }[reduction]
    want = by_hand(torch.ones(len(labels)), reduce, factor, live)
    assert term.total == pytest.approx(want.total, rel=1e-5)
    assert term.spread == pytest.approx(0, abs=1e-5)
    assert term.soft == (smoothing > 0)
    if not smoothing:
        agrees(term, want, 1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), FACTORS), min_size=1, max_size=6), st.booleans())
def test_terms_are_never_guessed_together(shapes: list[tuple[int, float]], stacked: bool) -> None:
    losses, want = [], []
    for size, factor in shapes:
        x = torch.randn(size, 2, requires_grad=True)
        losses.append(factor * F.mse_loss(x, torch.zeros(size, 2)))
        want.append((2 * size, factor / (len(shapes) if stacked else 1)))
    loss = torch.stack(losses).mean() if stacked else sum(losses, torch.zeros(()))
    weighing, terms = weighed(loss)
    assert weighing.opaque is None
    assert [(t.supervised, pytest.approx(t.total, rel=1e-5)) for t in terms] == want


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), FACTORS)
def test_the_law_holds_over_a_group(counts: list[int], scale: float) -> None:
    """Contributions normalised by the group's count give every element the same coefficient, and 1 in all."""
    whole = max(sum(counts), 1)
    terms: list[Term] = []
    for count in counts:
        logits = torch.randn(5, 3, requires_grad=True)
        target = torch.tensor([1] * count + [-100] * (5 - count))
        terms.append(one(F.cross_entropy(logits, target, reduction="sum") / whole * scale))
    assert sum(t.supervised or 0 for t in terms) == sum(counts)
    live = [t for t in terms if t.supervised]
    assert sum(t.total for t in live) / scale == pytest.approx(1 if live else 0)
    for term in live:
        assert term.coefficient / scale == pytest.approx(1 / whole)
