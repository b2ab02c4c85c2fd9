"""What each replica's contributions weigh in an update of all: one law for the elements of every rank.

Over the ranks whose gradients are averaged, the coefficient of a supervised element must be the same on every rank, and
the sum over all of them the number of ranks (one, where gradients are added up).
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halfstep.checks.accumulation.evidence import Evidence
from halfstep.checks.accumulation.weights import Strand, Term, even, near, strands
from halfstep.checks.replicas.ranks import CrossCheck, Totals, Turn
from halfstep.events import Division, Finding, GradientsEdited, Place

_SLIGHT, _CLEAR = 0.05, 0.2  # relative deviation of an element's coefficient: worth a word, worth an error
_SHARE = 0.5  # of the updates
_OTHER = frozenset(("ctc", "policy_gradient"))  # their elements are not what they are averaged over
_WORLD = re.compile(r"world|nprocs|num_(proc|rank|replica|gpu|device)|n_?(gpus?|ranks?)\b|replicas", re.IGNORECASE)


@dataclass(slots=True)
class Joint:
    """One term of one loss over several ranks; ``factor``: what the exchange multiplies each rank's gradient by."""

    strands: dict[int, Strand]
    terms: dict[int, Term]
    factor: float

    @property
    def totals(self) -> list[float]:
        return [t.total for t in self.terms.values()]

    @property
    def elements(self) -> list[float]:
        return [t.elements for t in self.terms.values()]

    @property
    def total(self) -> float:
        """What the coefficients of all ranks add up to: 1 for a mean over all elements."""
        return math.fsum(self.totals) * self.factor

    @property
    def deviation(self) -> float:
        """The largest relative distance of an element's coefficient from their mean over all ranks."""
        mean = math.fsum(self.totals) / math.fsum(self.elements)
        return max(abs(t.total / t.elements / mean - 1) for t in self.terms.values()) if mean else math.nan

    @property
    def close(self) -> float:
        return max(t.close for t in self.terms.values())

    @property
    def at(self) -> Place | None:
        last = next(iter(self.strands.values())).last
        return last.loss_at or last.at


class WeightsAcrossReplicas(CrossCheck):
    rules = ("mean-of-means-across-replicas", "loss-divided-by-world-size")

    def __init__(self) -> None:
        self._means: dict[int, Evidence] = {}
        self._world: dict[int, Evidence] = {}

    def updated(self, turns: Mapping[int, Turn]) -> Iterable[Finding]:
        for route, joint in _joints(turns):
            self._means.setdefault(route, Evidence(share=_SHARE, weight="deviation"))
            self._world.setdefault(route, Evidence(share=_SHARE))
            self._mean_of_means(turns, route, joint)
            self._divided(turns, route, joint)
        return ()

    def end(self, totals: Mapping[int, Totals]) -> Iterable[Finding]:
        for evidence in (*self._world.values(), *self._means.values()):
            yield from evidence.rest()

    def _mean_of_means(self, turns: Mapping[int, Turn], route: int, joint: Joint) -> None:
        self._means[route].chance()
        terms = joint.terms.values()
        if any(t.uneven_inside or t.loss in _OTHER for t in terms) or _by_classes(joint):
            return
        deviation = joint.deviation
        if not even(joint.totals, joint.close) or not deviation > _SLIGHT:
            return
        low, high = min(joint.elements), max(joint.elements)
        fewest, most = (next(r for r, t in joint.terms.items() if t.elements == n) for n in (low, high))
        weight = joint.totals[0] * joint.factor
        self._means[route].add(
            Finding(
                rule="mean-of-means-across-replicas",
                severity="error" if deviation > _CLEAR else "warning",
                at=joint.at,
                update=_number(turns),
                message=(
                    f"rank {fewest} has {low:g} supervised elements in this update and rank {most} has {high:g}, yet "
                    f"each rank's mean has the same weight {weight:.4g}: an element of the first counts "
                    f"{high / low:.3g} times as much as one of the other"
                ),
                evidence={
                    "elements": {str(r): t.elements for r, t in joint.terms.items()},
                    "weights": {str(r): t.total * joint.factor for r, t in joint.terms.items()},
                    "deviation": deviation,
                    "loss": next(iter(terms)).loss,
                },
                fix=(
                    "n_all = n.clone(); dist.all_reduce(n_all); loss = losses.sum() / n_all * dist.get_world_size()"
                    "  # DDP divides by the world size"
                ),
            )
        )

    def _divided(self, turns: Mapping[int, Turn], route: int, joint: Joint) -> None:
        self._world[route].chance()
        count = len(next(iter(turns.values())).fellows)
        each = [t.total / t.elements for t in joint.terms.values()]
        alike = even(joint.totals, joint.close) or even(each, joint.close)
        if count < 2 or len(turns) != count or not alike or not near(joint.total * count, 1.0, joint.close):
            return
        division = _by_ranks(joint, count) or _gradients_by_ranks(turns, count)
        if division is None:
            return
        self._world[route].add(
            Finding(
                rule="loss-divided-by-world-size",
                severity="error",
                at=division.at or joint.at,
                update=_number(turns),
                message=(
                    f"the loss is divided by the number of ranks ({count}), and so are the gradients when they are "
                    f"combined: the coefficients of all ranks' elements add up to {joint.total:.4g}, the gradient is "
                    f"{count} times too small"
                ),
                evidence={
                    "ranks": count,
                    "sum_of_coefficients": joint.total,
                    "divided_by": division.by,
                    "elements": {str(r): t.elements for r, t in joint.terms.items()},
                },
                fix=(
                    "leave the division to the backend: drop `/ world_size` (a sum over all ranks' elements is divided "
                    "by their number and multiplied by the world size)"
                ),
            )
        )


def _joints(turns: Mapping[int, Turn]) -> Iterable[tuple[int, Joint]]:
    """The terms that all ranks have, by the way their contributions came; nothing where they cannot be compared."""
    averaged = {turn.averaged for turn in turns.values()}
    count = len(next(iter(turns.values())).fellows)
    if len(averaged) != 1 or None in averaged or len(turns) != count:
        return
    factor = 1.0 / count if averaged.pop() else 1.0
    found: dict[int, dict[int, Strand]] = {}
    for rank, turn in turns.items():
        update = turn.update
        if update.attempt.closure or update.stale or not update.live:
            return
        for strand in strands(update):
            found.setdefault(strand.last.route, {})[rank] = strand
    for route, by_rank in found.items():
        if len(by_rank) != count or any(s.edited or not s.weighed for s in by_rank.values()):
            continue
        names = [{(t.loss, t.ordinal): t for t in s.terms if _known(t)} for s in by_rank.values()]
        for name in names[0]:
            if all(name in each for each in names):
                terms = {rank: each[name] for rank, each in zip(by_rank, names, strict=True)}
                yield hash((route, name)), Joint(by_rank, terms, factor)


def _known(term: Term) -> bool:
    return term.known and math.isfinite(term.total) and term.total != 0 and term.elements > 0


def _by_classes(joint: Joint) -> bool:
    """As many elements on each rank, weighted by their classes: whoever weights so means each rank's own mean."""
    counts = [sum(w.share.supervised or 0 for w in t.weights) for t in joint.terms.values()]
    return even(counts, 0.0)


def _by_ranks(joint: Joint, count: int) -> Division | None:
    """The division by the number of ranks that every contribution has."""
    strand = next(iter(joint.strands.values()))
    own, everyone = next(iter(joint.terms.values())).elements, math.fsum(joint.elements)
    size = strand.size
    wanted = {count, count * size, everyone, everyone * size}
    for division in strand.last.divisions:
        if any(near(division.by, w) for w in wanted) and not near(division.by, own):
            squares = count == 2 and next(iter(joint.terms.values())).is_square and near(division.by, 2)
            if not squares or (division.at is not None and _WORLD.search(linecache.getline(*_line(division.at)))):
                return division
    return None


def _gradients_by_ranks(turns: Mapping[int, Turn], count: int) -> Division | None:
    """The same division, of the gradients after their contributions."""
    between = next(iter(turns.values())).update.between
    edits = [e for e in between if isinstance(e, GradientsEdited) and e.factor is not None]
    return next((Division(by=count, at=e.at) for e in edits if near(e.factor or 0.0, 1 / count)), None)


def _line(at: Place) -> tuple[str, int]:
    return at.file, at.line


def _number(turns: Mapping[int, Turn]) -> int:
    return next(iter(turns.values())).update.number
