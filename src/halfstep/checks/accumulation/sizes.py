"""Sizes of groups: the rest at the end of an epoch, divided by too much, or left for the next epoch's first update.

The usual size is learnt from the losses' own division where they have one, else from the sizes themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from halfstep.checks.accumulation.evidence import Evidence
from halfstep.checks.accumulation.weights import Strand, Term, near
from halfstep.checks.story import Update
from halfstep.events import Division, Finding

_KEPT = 64  # odd groups remembered


@dataclass(slots=True)
class _Odd:
    """A group of an unusual size: the which one it was, what to say of it, and what speaks for its being a rest.

    ``apart``: stepped at another line than the others; ``spans``: a loader ran through within it.
    """

    number: int
    size: int
    finding: Finding
    apart: bool = False
    spans: bool = False


class Sizes:
    """``whole``: size -> groups of that size whose coefficients add up to 1."""

    def __init__(self) -> None:
        self.whole: Counter[int] = Counter()
        self._groups = 0
        self._sizes: Counter[int] = Counter()
        self._places: Counter[tuple[str, int] | None] = Counter()
        self._short: list[_Odd] = []
        self._told = 0
        self._long: list[_Odd] = []
        self._leftover = Evidence(least=1, share=0.0)

    def note(self, update: Update, strand: Strand, spans: bool) -> None:
        """A group's size, whatever its losses weigh; ``spans``: a pass through the data ended within it."""
        size, main = strand.size, strand.main
        usual = self._sizes.most_common(1)[0][0] if self._sizes else size
        self._sizes[size] += 1
        right = main is not None and main.parts() == size
        if usual < size < 2 * usual and len(self._long) < _KEPT and not right:
            self._long.append(_Odd(update.number, size, _leftover(update, strand, usual, None), spans=spans))

    def unjudged(self) -> None:
        """A group whose coefficients are not known."""
        self._groups += 1

    def judge(self, update: Update, strand: Strand, main: Term, parts: int | None) -> None:
        """``parts``: the number that each of its losses was divided by."""
        self._groups += 1
        place = update.attempt.at
        here = (place.file, place.line) if place else None
        self._places[here] += 1
        size = strand.size
        if parts is not None and parts == size:
            self.whole[size] += 1
        if parts is None or parts < 2 or not self.whole[parts]:
            return
        if size < parts:
            apart = here is not None and here != self._places.most_common(1)[0][0]
            self._short.append(_Odd(self._groups, size, _partial(update, strand, main, parts), apart=apart))
        elif parts < size < 2 * parts:
            self._leftover.add(_leftover(update, strand, parts, main.total))

    def firm(self, excused: bool) -> Iterator[Finding]:
        """``excused``: short groups follow from another fault."""
        yield from self._leftover.firm()
        if not excused:
            yield from self._tails(over=False)

    def rest(self, excused: bool) -> Iterator[Finding]:
        self._rests_by_size()
        yield from self._leftover.rest()
        if not excused:
            yield from self._tails(over=True)

    def _tails(self, over: bool) -> Iterator[Finding]:
        """Short groups told once they are the tail of something: at even distances, at a line of their own, last.

        A group that is short because a bad micro-batch was left out is none.
        """
        if not self._short:
            return
        numbers = [odd.number for odd in self._short]
        regular = len(numbers) > 1 and len({b - a for a, b in pairwise([self._told, *numbers])}) == 1
        if regular or all(odd.apart for odd in self._short) or (over and numbers[-1] == self._groups):
            yield from (odd.finding for odd in self._short)
            self._told = numbers[-1]
            self._short.clear()
        elif len(self._short) > _KEPT:
            del self._short[0]

    def _rests_by_size(self) -> None:
        """All groups of one size, but for the first after each pass: it holds the rest of that pass too."""
        if not self._long or self._leftover.seen:
            return
        usual, often = self._sizes.most_common(1)[0]
        count, size = len(self._long), self._long[0].size
        gaps = {b.number - a.number for a, b in pairwise(self._long)}
        regular = all(odd.spans for odd in self._long) or (count > 1 and len(gaps) == 1)
        alike = size < 2 * usual and all(odd.size == size for odd in self._long)
        if regular and alike and often >= max(3, 2 * count) and often + count >= self._sizes.total():
            for odd in self._long:
                self._leftover.add(odd.finding)


def _partial(update: Update, strand: Strand, main: Term, parts: int) -> Finding:
    size = strand.size
    divided = next((d for d in strand.divisions() if near(d.by, parts)), Division(by=parts))
    batches = "1 micro-batch" if size == 1 else f"{size} micro-batches"
    return Finding(
        rule="partial-group-underweighted",
        severity="warning",
        at=divided.at or strand.last.at,
        update=update.number,
        message=(
            f"a short group of {batches} was divided by the full {parts}: its coefficients add up to {main.total:.3g}, "
            f"its gradient is {parts / size:.3g} times too small"
        ),
        evidence={"micro_batches": size, "usual": parts, "sum_of_coefficients": main.total},
        fix="divide by the micro-batches (better: supervised elements) the last group really has",
    )


def _leftover(update: Update, strand: Strand, usual: int, total: float | None) -> Finding:
    size = strand.size
    return Finding(
        rule="leftover-micro-batches",
        severity="error",
        at=strand.last.at,
        update=update.number,
        message=(
            f"this update took {size} micro-batches instead of {usual}: {size - usual} were left over from an "
            "unfinished group" + (f", and the coefficients add up to {total:.3g}" if total is not None else "")
        ),
        evidence={"micro_batches": size, "usual": usual, "sum_of_coefficients": total},
        fix="at the end of an epoch step the rest (divided by its own size) or clear it with zero_grad()",
    )
