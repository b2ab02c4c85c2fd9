"""Holds what was declared (weights, reduction) against what the losses themselves were seen to divide by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halfstep.engine.journal import Journal
from halfstep.engine.ledger import Share
from halfstep.errors import WeightError

SAME = 1e-2  # denominators counted in half precision are this far off
EXACT = 1e-3  # a division by A shows exactly


class Verification:
    """The verdicts of one run. The first group's disagreement is an error, a later one a note."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ratios: dict[int, float] = {}
        self._doubtful = False
        self.updates = 0
        self.contributions = 0
        self.weighed = 0
        self.opaque: dict[str, int] = {}
        self.verdict: str | None = None
        """"verified" | "disagrees"; None: nothing to hold against each other yet."""

    def hold(self, share: Share, reduction: str, size: int, update: int, degree: int = 1) -> None:
        """Weigh the contributions of one update.

        ``reduction`` as declared; ``size`` is A, the micro-batches of a full group; ``degree`` is D. Raises
        :class:`~halfstep.errors.WeightError` on the first update that could be judged, changes nothing then.
        """
        live = [c for c in share.contributions if not c.empty]
        if not live:
            return
        self.updates += 1
        self.contributions += len(live)
        seen = [c for c in live if c.opaque is None and c.terms]
        self.weighed += len(seen)
        for contribution in live:
            if contribution.opaque is not None:
                self.opaque[contribution.opaque] = self.opaque.get(contribution.opaque, 0) + 1
        if share.weights is None or len(seen) != len(live) or share.mode == "plain":
            return
        self._doubtful = False
        fault = self._judge(seen, reduction, size)
        if fault is None and reduction == "mean" and degree > 1 and self._is_split(seen, degree):
            self._doubtful = True
            self._journal.note(
                "a share of 1/D",
                f"each loss gives its elements a total weight of 1/{degree} where a mean gives 1: gradients are "
                f"averaged over D = {degree} replicas already; leave a division by their number out of the loss",
                update=update,
            )
        if fault is None:
            if not self._doubtful:
                self.verdict = self.verdict or "verified"
            return
        if self.verdict is None:
            self._ratios.clear()
            raise WeightError(*fault)
        self.verdict = "disagrees"
        self._journal.note("weights disagree", f"{fault[0]}; {fault[1]}", update=update)

    def _judge(self, seen: Sequence[Any], reduction: str, size: int) -> tuple[str, str] | None:
        micro_batches: dict[int, list[tuple[Any, Any, float]]] = {}  # rows of (term, factor its root got, weight)
        for contribution in seen:
            terms = [(term, factor) for term, factor in contribution.terms if term.loss != "penalty"]
            weights = [float(w) for w in contribution.weights]
            if len(weights) == 1:
                weights *= len(terms)
            if len(terms) != len(weights):
                return None  # several losses in one of several terms: which belongs to which is not known
            row = micro_batches.setdefault(contribution.micro_batch, [])  # several backwards are several terms
            row.extend((term, factor, weight) for (term, factor), weight in zip(terms, weights, strict=True))
        rows = list(micro_batches.values())
        width = {len(row) for row in rows}
        if len(width) != 1 or 0 in width:
            return None
        columns = list(zip(*rows, strict=True))
        # Under "none" a share of 1/A is what equal weights w/W come to.
        divided = self._divided(columns, size) if reduction != "none" else None
        if divided is not None:
            return divided
        judge = {"mean": self._mean, "sum": self._sum, "none": self._none}[reduction]
        faults = [judge(i, [e for e in c if e[0].supervised != 0 and e[2] > 0.0]) for i, c in enumerate(columns)]
        found = [fault for fault in faults if fault is not None]
        if 0 < len(found) < len(faults):  # one scalar, several denominators, of which one was declared
            self._journal.note(
                "a term has another denominator", f"{found[0][0]}; give terms as a list, each its weight"
            )
            return None
        if found and any(_is_guess(c) for c, fault in zip(columns, faults, strict=True) if fault is not None):
            self._journal.note("weights may disagree", f"{found[0][0]}; what it averages was not recognised as a loss")
            self._doubtful = True
            return None
        return found[0] if found else None

    @staticmethod
    def _is_split(seen: Sequence[Any], degree: int) -> bool:
        """Whether every loss carries exactly 1/D."""
        shares = [
            t.total / f for c in seen for t, f in c.terms if t.supervised and t.loss not in ("elementwise", "penalty")
        ]
        return bool(shares) and all(abs(share * degree - 1.0) < EXACT for share in shares)

    def _divided(self, columns: list[tuple[Any, ...]], size: int) -> tuple[str, str] | None:
        """Every loss carries exactly 1/A: somebody divided already."""
        if size < 2:
            return None
        shares = [t.total / f for c in columns for t, f, _ in c if t.supervised and t.loss != "elementwise"]
        if shares and all(abs(share * size - 1.0) < EXACT for share in shares):
            return (
                f"the losses are already divided by A = {size}: each gives its elements a total weight of "
                f"{shares[0]:.4g} where a mean gives 1",
                f"leave the division by {size} out: the manager divides by the group's weight",
            )
        return None

    def _mean(self, index: int, column: Sequence[Any]) -> tuple[str, str] | None:
        if not column or any(t.divisor is None or not t.spread <= SAME for t, _, _ in column):
            return None  # elements that weigh differently within a micro-batch: the weights may well be meant
        divisors = [t.divisor if t.reduction == "mean" else t.divisor * f for t, f, _ in column]
        weights = [w for _, _, w in column]
        if all(t.reduction == "sum" and _near(t.coefficient, f) and w > 1.0 for t, f, w in column):
            return (
                f"the loss sums over {_list([t.supervised for t, _, _ in column])} elements, the reduction declared is "
                '"mean"',
                'groups(…, reduction="sum"), or a mean loss',
            )
        ratios = [d / w for d, w in zip(divisors, weights, strict=True)]
        known = self._ratios.get(index)
        if max(ratios) > min(ratios) * (1 + SAME) or (known is not None and not _near(ratios[0], known)):
            return (
                f"the loss averaged over {_list(divisors)} elements, you declared {_declared(weights)}"
                + ("" if known is None else f" (the run began with {known:.4g} elements to a unit of weight)"),
                'declare what the loss averages over: tokens("labels") for tokens, the mask\'s sum for a mask; or '
                "weight=None reads it from the loss",
            )
        self._ratios.setdefault(index, ratios[0])
        return None

    def _sum(self, index: int, column: Sequence[Any]) -> tuple[str, str] | None:
        averaged = [
            t for t, f, _ in column if t.supervised and t.supervised > 1 and _near(t.coefficient * t.supervised, f)
        ]
        if column and len(averaged) == len(column):
            counts = _list([t.divisor or t.supervised for t in averaged])
            return (
                f'the reduction declared is "sum", the loss averaged over {counts} elements',
                'groups(…, reduction="mean"), or a loss with reduction="sum"',
            )
        return None

    def _none(self, index: int, column: Sequence[Any]) -> tuple[str, str] | None:
        each = [t.coefficient / f for t, f, _ in column if math.isfinite(t.coefficient)]
        if each and max(each) > min(each) * (1 + SAME):
            return (
                f"the elements of a group weigh {', '.join(f'{c:.4g}' for c in each)} in its micro-batches: the losses "
                "were not all divided by one W",
                "divide the sum of each micro-batch's losses by group.weight",
            )
        return None


def _is_guess(column: Sequence[Any]) -> bool:
    """Whether these elements hold no target: a mean of outputs, which may be a loss or part of one."""
    return any(term.loss == "elementwise" for term, _, _ in column)


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= SAME * abs(other)


def _list(values: Sequence[Any]) -> str:
    shown = [f"{round(v, 2):g}" if isinstance(v, float) else str(v) for v in values[:8]]
    return ", ".join(shown) + (", …" if len(values) > 8 else "")


def _declared(weights: Sequence[float]) -> str:
    return f"{weights[0]:g} each" if len(set(weights)) == 1 else _list(list(weights))
