"""What each micro-batch of a group weighs: the model that the denominators are judged by.

The coefficient of a supervised element, loss scale and later factors taken out, must be the same all over a group and
add up to one (per term). A group here is the contributions of one update; contributions of several ranks may be put
into one `Term` just the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from halfstep.checks.story import Update
from halfstep.events import Contribution, Division, GradientsEdited, OptimizerMade, Share

CLOSE = 0.004  # two sums of coefficients that differ by less are equal (FP32 losses)
CLOSE_HALF = 0.02  # where the loss itself was in half precision: BF16 has 8 bits
_FIRST_ORDER = "SGD Adam AdamW Adamax NAdam RAdam SparseAdam Adafactor Muon Adagrad Adadelta RMSprop Rprop ASGD"
_CALLS_ONCE = frozenset(_FIRST_ORDER.split(" "))
_SQUARES = frozenset({"mse", "elementwise", "smooth_l1", "huber", "l1"})


@dataclass(frozen=True, slots=True)
class Weight:
    """What one contribution gives to one term: ``total`` coefficient over ``elements`` supervised elements.

    ``mass``: the sum of their class weights, without any their number.
    """

    total: float
    elements: float
    mass: float
    share: Share
    contribution: Contribution

    @property
    def each(self) -> float:
        """The coefficient of one supervised element."""
        return self.total / self.elements if self.elements else math.nan


@dataclass(slots=True)
class Term:
    """One term of the loss over a group. ``known``: every contribution's weight of it could be read."""

    loss: str
    ordinal: int
    weights: list[Weight] = field(default_factory=list)
    known: bool = True
    close: float = CLOSE

    @property
    def total(self) -> float:
        """What the coefficients add up to: 1 for a mean over the group."""
        return math.fsum(w.total for w in self.weights)

    @property
    def elements(self) -> float:
        return math.fsum(w.elements for w in self.weights)

    @property
    def alike(self) -> bool:
        """Every contribution has the same total."""
        return even([w.total for w in self.weights], self.close)

    @property
    def deviation(self) -> float:
        """The largest relative distance of an element's coefficient from the group's own mean coefficient.

        Elements are counted as such or by their class weights, whichever the script is nearer to.
        """
        counts = ([w.elements for w in self.weights], [w.mass for w in self.weights])
        return min(self._distance(each) for each in counts)

    def _distance(self, counts: list[float]) -> float:
        mean = self.total / math.fsum(counts) if all(counts) else math.nan
        if not mean or math.isnan(mean):
            return math.nan
        return max(abs(w.total / n / mean - 1) for w, n in zip(self.weights, counts, strict=True))

    @property
    def uneven_inside(self) -> bool:
        """Elements of one micro-batch already differ in weight: the objective is not a mean over elements."""
        return any(w.share.spread > 0.05 for w in self.weights)

    @property
    def is_square(self) -> bool:
        """A loss that people halve by habit."""
        return self.loss in _SQUARES

    def parts(self) -> int | None:
        """The whole number B where every total is 1/B; None where there is none."""
        if not self.alike or not self.weights:
            return None
        mean = self.total / len(self.weights)
        return whole(1 / mean, self.close) if mean > 0 else None


@dataclass(slots=True)
class Strand:
    """The contributions of a group that came the same way, by the same lines of the script: its micro-batches.

    Contributions from other lines are other losses, not micro-batches of this one. ``edited``: the script did something
    to their gradients that cannot be told as one factor.
    """

    contributions: list[Contribution]
    terms: list[Term]
    edited: bool

    @property
    def size(self) -> int:
        return len(self.contributions)

    @property
    def last(self) -> Contribution:
        return self.contributions[-1]

    @property
    def weighed(self) -> bool:
        return all(c.opaque is None for c in self.contributions) and bool(self.terms)

    @property
    def main(self) -> Term | None:
        """The term with the largest total, once all are known."""
        known = [t for t in self.terms if t.known and math.isfinite(t.total)]
        return max(known, key=lambda t: t.total, default=None)

    def divisions(self) -> list[Division]:
        """Those that all contributions have, in the order from the root down."""
        others = [c.divisions for c in self.contributions]
        return [d for d in self.last.divisions if all(any(near(o.by, d.by) for o in each) for each in others)]

    def same_parameters(self, optimizer: int) -> bool:
        """Every contribution reached the same parameters of this optimizer (heads of several tasks do not)."""
        return len({c.reached.get(optimizer) for c in self.contributions}) == 1


def is_driven(update: Update, made: OptimizerMade | None) -> bool:
    """The optimizer calls its closure as often as it likes: it decides what a group is (LBFGS, SAM).

    torch's first-order optimizers call it once, before anything else: trainers hand them their last micro-batch in it.
    """
    return update.attempt.closure and (made is None or made.type not in _CALLS_ONCE)


def strands(update: Update, contributions: Sequence[Contribution] | None = None) -> list[Strand]:
    """The update's contributions (by default those that its optimizer really used) by the way they came."""
    factor = later_factor(update)
    by_route: dict[int, list[Contribution]] = {}
    for contribution in update.live if contributions is None else contributions:
        by_route.setdefault(contribution.route, []).append(contribution)
    return [
        Strand(
            members,
            terms(members, update.attempt.divided_by, factor or 1.0),
            factor is None or any(c.hooked for c in members),
        )
        for members in by_route.values()
    ]


def later_factor(update: Update) -> float | None:
    """What the script multiplied all gradients by since their contributions; None where it cannot be told."""
    factor, live = 1.0, update.live
    reached = max((c.optimizers.get(update.optimizer, 0) for c in live), default=0)
    for event in update.between:
        if isinstance(event, GradientsEdited):
            between = bool(live) and event.seq < live[-1].seq  # only what came before it was multiplied
            if event.factor is None or between or event.optimizers.get(update.optimizer, 0) < reached:
                return None
            factor *= event.factor
    return factor


def terms(contributions: Sequence[Contribution], divided_by: float | None = None, factor: float = 1.0) -> list[Term]:
    """The terms that all these contributions have, each with one weight a contribution.

    ``divided_by``: what the optimizer divides by inside its own pass, the loss scale included; without it each
    contribution's own scale is taken out.
    """
    found: dict[tuple[str, int], Term] = {}
    for contribution in contributions:
        scale = divided_by if divided_by is not None else (contribution.scale or 1.0)
        seen: dict[str, int] = {}
        for share in contribution.shares:
            ordinal = seen[share.loss] = seen.get(share.loss, -1) + 1
            if share.loss == "penalty":
                continue
            term = found.setdefault((share.loss, ordinal), Term(share.loss, ordinal))
            if contribution.dtype in ("float16", "bfloat16"):
                term.close = CLOSE_HALF
            count, total = math.nan, math.nan
            if share.supervised is None or not math.isfinite(share.total) or not math.isfinite(scale) or scale == 0:
                term.known = False
            else:
                count, total = float(share.supervised), share.total * factor / scale
            mass = count if share.weight_sum is None else share.weight_sum
            term.weights.append(Weight(total, count, mass, share, contribution))
    return [t for t in found.values() if len(t.weights) == len(contributions)]


def even(values: Iterable[float], close: float = CLOSE) -> bool:
    """All alike, to a relative tolerance."""
    known = list(values)
    if not known or not all(map(math.isfinite, known)):
        return False
    low, high = min(known), max(known)
    return high > 0 and high - low <= close * high


def near(value: float, target: float, close: float = CLOSE) -> bool:
    return math.isfinite(value) and abs(value - target) <= close * abs(target)


def whole(value: float, close: float = CLOSE) -> int | None:
    """The whole number that ``value`` is, to a relative tolerance."""
    if not math.isfinite(value) or value < 0.5:
        return None
    nearest = round(value)
    return nearest if near(value, nearest, min(close, 0.4 / max(nearest, 1))) else None
