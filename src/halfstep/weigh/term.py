"""What one term of a contribution weighs, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a loss: what a contribution gives to each of its elements.

    The coefficient of an element is the derivative of the scalar that backward started from with respect to the
    element's own loss, taken without its sign. Every factor is in it: a mean's divisor, ``1/A``, the loss scale,
    ``0.25 *``. Class weights are not: they belong to the element's loss.
    """

    loss: str
    """The field's name: "cross_entropy", "nll", "mse", "l1", "huber", "smooth_l1", "bce", "bce_with_logits", "kl_div",
    "ctc", "multi_margin"...; "elementwise": anything else that ends in elements; "penalty": of one parameter, nothing
    of the data is in it; "policy_gradient": log-probabilities times values of both signs, which no count explains."""
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
    live: int | None = None
    """Elements that a mask on the loss's inputs left, where it made both sides zero elsewhere (``mse(p * m, y * m)``);
    None: there is no such mask, or it was not looked at (``detail=False``). ``supervised`` knows nothing of it."""


@dataclass(slots=True)
class Reading:
    """What one place of the graph showed. Places on the same logits may be addends of one term: see ``join``."""

    loss: str
    reduction: str
    positions: int
    supervised: int | None
    weight_sum: float | None
    targets: int | None
    parts: int
    kind: str
    weighted: bool
    group: int | None
    total: float = 0.0
    plain: float = 0.0  # the total without class weights
    mass: float = 0.0  # the same over all positions
    spread: float = 0.0
    divisor: float | None = None  # a mean node's own
    live: int | None = None
    soft: bool = False

    def add(self, other: Reading, factor: float = 1.0) -> None:
        """Take in an addend of the same term: coefficients add up position by position."""
        total = self.plain + other.plain * factor
        if total:
            self.spread = (self.spread * self.plain + other.spread * other.plain * factor) / total
        self.total += other.total * factor
        self.plain = total
        self.mass += other.mass * factor
        self.soft = True

    def term(self) -> Term:
        counted = self.positions if self.supervised is None else self.supervised
        divisor = self.divisor
        if divisor is None and self.plain > 0 and math.isfinite(self.plain):
            divisor = counted / self.plain
        known = self.mass > 0 and math.isfinite(self.mass)
        return Term(
            loss=self.loss,
            reduction=self.reduction,
            positions=self.positions,
            supervised=self.supervised,
            weight_sum=self.weight_sum,
            divisor=divisor if counted else None,
            total=self.total,
            coefficient=self.total / self.supervised if self.supervised else math.nan,
            spread=self.spread,
            ignored_share=min(max(1 - self.plain / self.mass, 0.0), 1.0) if known else 0.0,
            targets=self.targets,
            soft=self.soft or self.kind in ("soft", "classes"),
            parts=self.parts,
            live=self.live,
        )


def join(readings: list[Reading]) -> list[Reading]:
    """Put the addends of one term together.

    On the same logits, losses over the same number of targets are one term (mixup: two targets of one example), and
    what weighs all classes alike is label smoothing, the other addend of the loss beside it. Anything else stays a
    term of its own: two losses that only share their logits may have two denominators.
    """
    terms: list[Reading] = []
    heads: dict[int, list[Reading]] = {}
    for reading in readings:
        if reading.kind not in ("loss", "chosen") or reading.group is None:
            continue
        same = [h for h in heads.setdefault(reading.group, []) if _size(h) == _size(reading)]
        if same:
            same[0].add(reading)
        else:
            heads[reading.group].append(reading)
    for reading in readings:
        head = heads.get(reading.group, []) if reading.group is not None else []
        if reading.kind == "classes" and not head and reading.group is not None:
            head = [r for r in readings if r.group == reading.group and r.kind == "soft" and r.loss == "cross_entropy"]
        if reading.kind == "classes" and head:
            # Torch's smoothing divides by the weights of the targets, too: counted without weights, as the target's.
            ratio = 1.0
            if reading.weighted and head[0].weight_sum and head[0].supervised:
                ratio = head[0].weight_sum / head[0].supervised
            head[0].add(reading, ratio)
        elif reading.kind not in ("loss", "chosen") or not head or any(reading is h for h in head):
            terms.append(reading)
    return terms


def _size(reading: Reading) -> tuple[int, int | None, str]:
    return reading.positions, reading.supervised, reading.reduction
