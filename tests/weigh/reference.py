"""Coefficients by hand: the derivative of a reduction, written out in FP64, with respect to each element's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from halfstep.weigh import Term, Weighing, weigh

Tensor = torch.Tensor


@dataclass(frozen=True)
class Expected:
    """What the elements weigh, from ``reduce`` alone: nothing of the graph under test is in it."""

    total: float
    supervised: int
    spread: float
    ignored_share: float


def expected(elements: Tensor, reduce: Callable[[Tensor], Tensor], live: Tensor | None = None) -> Expected:
    """``elements``: FP64 losses, one for each element; ``live``: which are supervised (None: all)."""
    leaf = elements.detach().double().requires_grad_()
    (coefficients,) = torch.autograd.grad(reduce(leaf), leaf)
    sizes = coefficients.abs().flatten()
    keep = torch.ones_like(sizes, dtype=torch.bool) if live is None else live.flatten().bool()
    kept = sizes[keep]
    kept = kept[kept > 0] if live is None else kept
    mean = kept.mean()
    return Expected(
        total=kept.sum().item(),
        supervised=kept.numel(),
        spread=((kept.max() - kept.min()) / mean).item(),
        ignored_share=(1 - kept.sum() / sizes.sum()).item(),
    )


def weighed(loss: Tensor, **options: object) -> tuple[Weighing, tuple[Term, ...]]:
    """Weigh a loss, run backward, take the hooks off."""
    weighing = weigh(loss, **options)  # type: ignore[arg-type]
    loss.backward()
    weighing.remove()
    return weighing, weighing.read()


def one(loss: Tensor, **options: object) -> Term:
    """The only term of a loss that can be weighed in whole."""
    weighing, terms = weighed(loss, **options)
    assert weighing.opaque is None
    assert len(terms) == 1, terms
    return terms[0]


def agrees(term: Term, want: Expected, tolerance: float = 1e-6) -> None:
    assert term.supervised == want.supervised
    assert abs(term.total - want.total) <= tolerance * want.total
    assert abs(term.coefficient - want.total / want.supervised) <= tolerance * term.coefficient
    assert abs(term.spread - want.spread) <= tolerance * 10
    assert abs(term.ignored_share - want.ignored_share) <= tolerance
