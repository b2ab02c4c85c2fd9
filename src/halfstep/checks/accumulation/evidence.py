"""Evidence that gathers over updates before it becomes a finding: one odd update is no habit of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from halfstep.events import Finding

_MOST = 256  # optimizers, or ways to a backward, of which something is remembered
Key = TypeVar("Key")
Value = TypeVar("Value")


def recall(memory: dict[Key, Value], key: Key, new: Callable[[], Value]) -> Value:
    """What is remembered of ``key``, or something new; the one asked for longest ago goes where they would be too many.

    A script may make an optimizer for each of its thousands of tasks.
    """
    known = memory.get(key)
    if known is None:
        if len(memory) >= _MOST:
            del memory[next(iter(memory))]
        known = memory[key] = new()
    else:
        memory[key] = memory.pop(key)
    return known


@dataclass(slots=True)
class _Case:
    first: Finding
    count: int = 0


class Evidence:
    """Occurrences of one rule among the chances it had.

    `firm` gives the finding once it was seen ``least`` times and in ``share`` of the chances, with its count, and
    every later occurrence after that; `rest` is for the end of the run, where one occurrence may be all there is.
    One cause is told at one line: the one where it was seen most. ``weight``: the evidence that says how grave it was.
    """

    def __init__(self, least: int = 3, share: float = 0.5, weight: str | None = None) -> None:
        self._least = least
        self._share = share
        self._weight = weight
        self._cases: dict[tuple[object, ...], _Case] = {}
        self._case: _Case | None = None  # the one that is told
        self._told = 0
        self.chances = 0
        self.seen = 0

    def chance(self) -> None:
        """An update in which it could have happened."""
        self.chances += 1

    def add(self, finding: Finding) -> None:
        self.seen += finding.count
        at = finding.at
        case = self._cases.setdefault((at.file, at.line) if at else (), _Case(finding))
        case.count += finding.count
        if self._weight is not None and _value(finding, self._weight) > _value(case.first, self._weight):
            case.first = dataclasses.replace(finding, update=case.first.update)  # the gravest is the one to show

    @property
    def habitual(self) -> bool:
        return bool(self.seen) and self.seen >= self._share * self.chances

    def firm(self) -> Iterator[Finding]:
        if self.seen >= self._least and self.habitual:
            yield from self._tell()

    def rest(self) -> Iterator[Finding]:
        if self.habitual:
            yield from self._tell()

    def _tell(self) -> Iterator[Finding]:
        if self._told == self.seen:
            return
        self._case = self._case or max(self._cases.values(), key=lambda case: case.count)
        yield dataclasses.replace(self._case.first, count=self.seen - self._told)
        self._told = self.seen


def _value(finding: Finding, name: str) -> float:
    value = finding.evidence.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
