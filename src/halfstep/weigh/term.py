"""What one term of a contribution weighs, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a loss: what a contribution gives to each of its elements.

    The coefficient of an element is the derivative of the scalar that backward started from with respect to the
    element's own loss, taken without its sign. Every factor is in it: a mean's divisor, ``1/A``, the loss scale,
    ``0.25 *``. Class weights are not: they belong to the element's loss.
    """

    loss: str
    """The field's name: "cross_entropy", "nll", "mse", "bce_with_logits", "elementwise", "penalty"..."""
    reduction: str
    """"mean" | "sum" | "none": of the node that holds the element losses, whatever is reduced above it."""
    positions: int
    """Elements in all, ignored ones included."""
    supervised: int | None
    """Elements that count: not ignored, not masked. None where it cannot be known without disturbing the run."""
    weight_sum: float | None
    """Sum of the class weights (for BCE: of its ``weight``) over supervised elements; without any, ``supervised``."""
    divisor: float | None
    """What the loss was averaged over, as seen: a mean node's own denominator, else one over the coefficient
    (which then carries every factor on the loss); None where nothing is supervised."""
    total: float
    """Sum of the coefficients over supervised elements: 1 for a plain mean; nan where 0 was divided by 0."""
    coefficient: float
    """``total / supervised``; nan where ``supervised`` is 0 or None."""
    spread: float
    """(largest - smallest) / mean of the coefficient over supervised elements; 0: all weigh the same; nan where
    it was not looked at (``detail=False``)."""
    ignored_share: float
    """Share of the coefficients that sits on positions whose target is not supervised. Such a position's loss is
    zero, so this harms only where it also lowers ``total``: a mean over all positions does, a sum over the right
    count does not."""
    targets: int | None
    """Examples: the leading dimension of the target, where known."""
    soft: bool = False
    """Soft targets, or label smoothing (its two addends are this one term)."""
    parts: int = 1
    """Components that an inner sum folds into one element before the average: 8 for
    ``((a - b) ** 2).sum(-1).mean()`` on 8 features, whose ``total`` is therefore 8."""
