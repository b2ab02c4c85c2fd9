"""Examples that two replicas saw in one update: told by their content, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halfstep.checks.replicas.ranks import CrossCheck, Totals, Turn
from halfstep.events import ExamplesSeen, Finding, Severity

_FEW = 4  # integers an example: distinct examples may well be equal
_KEPT = 4096
_RARE = 0.1  # share of updates below which an overlap is a remainder's
_OWN = 0.3  # repeats on one rank from update to update, against those across ranks: drawn with replacement


@dataclass(slots=True)
class _Pair:
    """Two ranks over the run."""

    updates: int = 0
    overlaps: int = 0
    wholes: int = 0
    shared: int = 0
    again: list[tuple[int, int, int]] = field(default_factory=list)  # contribution, seen again after it, shared
    fixed: bool = True  # every update on the same examples
    repeats: bool = False
    sampler: str = ""
    first: tuple[int, int, int, ExamplesSeen] | None = None  # update, shared, of, where
    contributions: set[int] = field(default_factory=set)  # the last of each update with an overlap
    last: dict[int, frozenset[int]] = field(default_factory=dict)
    last_number: int = 0


class DuplicateExamples(CrossCheck):
    rules = ("duplicate-examples-across-replicas",)

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def updated(self, turns: Mapping[int, Turn]) -> Iterable[Finding]:
        seen = {rank: _rows(turn) for rank, turn in turns.items()}
        ranks = [rank for rank, rows in sorted(seen.items()) if rows]
        for first, second in itertools.pairwise(ranks):
            self._compare(first, second, turns, seen)
        if len(ranks) > 2:
            self._compare(ranks[0], ranks[-1], turns, seen)
        return ()

    def _compare(self, first: int, second: int, turns: Mapping[int, Turn], seen: Mapping[int, frozenset[int]]) -> None:
        pair = self._pairs.setdefault((first, second), _Pair())
        a, b = seen[first], seen[second]
        shared = len(a & b)
        pair.updates += 1
        event = next(e for e in turns[second].examples if e.rows)
        if pair.last:
            pair.fixed &= pair.last[first] == a and pair.last[second] == b
            if len(pair.again) < _KEPT:
                again = max(len(pair.last[first] & a), len(pair.last[second] & b))
                pair.again.append((pair.last_number, again, shared))
        pair.last = {first: a, second: b}
        pair.last_number = turns[second].update.live[-1].number
        pair.repeats |= event.repeats
        pair.sampler = pair.sampler or event.sampler
        whole = a == b and len(a) > 1
        if not shared or (event.integers and event.width < _FEW and not whole):
            return
        pair.overlaps += 1
        pair.wholes += whole
        pair.shared += shared
        if len(pair.contributions) < _KEPT:
            pair.contributions.add(pair.last_number)
        if pair.first is None:
            pair.first = turns[second].update.number, shared, min(len(a), len(b)), event

    def end(self, totals: Mapping[int, Totals]) -> Iterable[Finding]:
        worst = max(self._pairs.items(), key=lambda item: (item[1].wholes, item[1].overlaps), default=None)
        if worst is not None and worst[1].first is not None:
            (first, second), pair = worst
            yield _finding(first, second, pair, totals[second].passes)


def _rows(turn: Turn) -> frozenset[int]:
    """The examples of the contributions that the update used."""
    used = {c.number for c in turn.update.live}
    return frozenset(row for e in turn.examples if e.contribution in used for row in e.rows if row)


def _finding(first: int, second: int, pair: _Pair, passes: set[int]) -> Finding:
    """``passes``: the last contribution of each pass through the data."""
    assert pair.first is not None
    update, shared, of, event = pair.first
    severity, why = _judged(pair, passes)
    often = f" ({pair.overlaps} of {pair.updates} updates looked at)" if pair.updates > 1 else ""
    return Finding(
        rule="duplicate-examples-across-replicas",
        severity=severity,
        at=event.at,
        update=update,
        count=pair.overlaps,
        message=f"ranks {first} and {second} saw the same {shared} of {of} examples in update {update}{often}{why}",
        evidence={
            "ranks": [first, second],
            "shared": shared,
            "of": of,
            "updates": pair.updates,
            "overlaps": pair.overlaps,
            "whole": pair.wholes,
            "sampler": pair.sampler,
        },
        fix=(
            "sampler = DistributedSampler(dataset); DataLoader(dataset, sampler=sampler, ...)"
            if event.source == "loader"
            else "give each rank its own part: order[rank::world_size] of one order that all ranks share"
        ),
    )


def _judged(pair: _Pair, passes: set[int]) -> tuple[Severity, str]:
    """How grave it is, and what to add."""
    if pair.updates < 2 or pair.fixed:
        return "info", ": one fixed batch on both"
    if pair.wholes >= 2 and pair.wholes > pair.updates * _RARE:
        return "error", ": all replicas train on the same data, the effective batch is one replica's"
    inside = [(own, shared) for number, own, shared in pair.again if number not in passes]
    if pair.repeats or sum(own for own, _ in inside) > _OWN * sum(shared for _, shared in inside):
        return "info", ": they are drawn with replacement"
    if pair.contributions <= passes:
        return "info", ": the last batch of a pass is filled up by repeating examples"
    if pair.overlaps < 2 or pair.overlaps <= pair.updates * _RARE:
        return "info", ""
    return "warning", ": the ranks do not share one order, each goes through the data on its own"
