"""What one optimizer's updates have been like: the evidence that its groups left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from halfstep.checks.accumulation.evidence import Evidence
from halfstep.checks.accumulation.weights import near
from halfstep.checks.story import Update
from halfstep.events import Attempt, Finding, GradientsEdited, Place

_PATIENCE = 24  # attempts without a clearing before it is called a habit


@dataclass(slots=True)
class Habit:
    """What one optimizer's updates have been like."""

    zeroed: Evidence = field(default_factory=lambda: Evidence(least=3))
    foreign: Evidence = field(default_factory=lambda: Evidence(least=2))
    probed: Evidence = field(default_factory=lambda: Evidence(least=1, share=0.0))
    moved: Evidence = field(default_factory=lambda: Evidence(least=2))
    kept: Evidence = field(default_factory=lambda: Evidence(least=1, share=0.0))
    half: Evidence = field(default_factory=lambda: Evidence(least=1, share=0.0))
    partly: Evidence = field(default_factory=lambda: Evidence(least=6, share=0.9))
    held: int = 0  # gradients that the last attempt found
    closure: bool = False
    clears: list[tuple[int, Place | None]] = field(default_factory=list)  # the last few: seq, place
    usual_clear: Place | None = None  # the last that came after an attempt
    since: list[Update] = field(default_factory=list)  # attempts on new contributions since the last clearing
    periods: list[int] = field(default_factory=list)
    skipped_since_clear: Attempt | None = None
    longest: int = 0
    uncleared: Finding | None = None
    edits: bool = False  # gradients are set by hand, or old ones kept on purpose
    zeroes: bool = False  # clears with operators, which are not seen when nobody looks
    stale: int = 0  # attempts on gradients of earlier ones
    told: int = 0
    last: Update | None = None

    def cleared(self, seq: int, at: Place | None, by_hand: bool) -> None:
        self.clears = [*self.clears[-15:], (seq, at)]
        if self.since:
            self.periods = [*self.periods[-63:], len(self.since)]
            self.usual_clear = at
        self.zeroes |= by_hand and self.last is not None
        self.since = []
        self.skipped_since_clear = None

    @property
    def never_clears(self) -> bool:
        return self.zeroes or (not self.periods and any(u.applied for u in self.since))

    def last_clear_before(self, seq: int) -> Place | None:
        return next((at for number, at in reversed(self.clears) if number < seq), None)

    def attempted(self, update: Update) -> None:
        if not update.live:
            return
        self.last = update
        began = update.live[0].seq
        edits = [e for e in update.between if isinstance(e, GradientsEdited)]
        self.edits |= any(e.factor is None or e.seq < began for e in edits)
        if self.edits:
            self.since = []  # the script sets them itself, or keeps a part of the old ones on purpose
            return
        self.since = [*self.since[-63:], update]
        if update.attempt.outcome == "skipped" and self.skipped_since_clear is None:
            self.skipped_since_clear = update.attempt
        if update.stale and any(u.applied for u in self.since[:-1]):
            self.stale += 1
            self.longest = max(self.longest, len(self.since))
            self.uncleared = self.uncleared or self._never_cleared(update)

    def _never_cleared(self, update: Update) -> Finding:
        return Finding(
            rule="gradients-never-cleared",
            severity="error",
            at=update.attempt.at,
            update=update.number,
            message=(
                f"gradients are not cleared between updates: this one used {update.stale} contributions of earlier "
                f"updates besides its own {len(update.live)}"
            ),
            evidence={"stale_contributions": update.stale, "contributions": len(update.live)},
            fix="optimizer.zero_grad() after each optimizer.step()",
        )

    @property
    def _gathered(self) -> tuple[Evidence, ...]:
        return (self.zeroed, self.foreign, self.probed, self.moved, self.kept, self.half, self.partly)

    def firm(self) -> Iterator[Finding]:
        for evidence in self._gathered:
            yield from evidence.firm()
        if self.uncleared is not None and self.longest >= _PATIENCE:
            yield from self._tell_uncleared()

    def rest(self) -> Iterator[Finding]:
        for evidence in self._gathered:
            yield from evidence.rest()
        if self.uncleared is None or self.longest < 3:
            return
        yield from self._tell_uncleared()

    def _tell_uncleared(self) -> Iterator[Finding]:
        if self.uncleared is None or self.stale == self.told or self.zeroes:
            return
        divided = self._divided_by()
        found = self.uncleared if divided is None else self._stepped_early(self.uncleared, divided)
        yield dataclasses.replace(found, count=self.stale - self.told)
        self.told = self.stale

    def _stepped_early(self, uncleared: Finding, divided: int) -> Finding:
        return Finding(
            rule="optimizer-step-every-micro-batch",
            severity="error",
            at=uncleared.at,
            update=uncleared.update,
            message=(
                f"the loss is divided by {divided} and gradients are cleared every {divided} micro-batches, yet the "
                "optimizer stepped after each of them, on an unfinished sum"
            ),
            evidence={"divided_by": divided, "updates_per_clearing": divided},
            fix=f"if (i + 1) % {divided} == 0: optimizer.step(); optimizer.zero_grad()",
        )

    def _divided_by(self) -> int | None:
        """Cleared every so many attempts, and the loss divided by that number: a group was meant."""
        if len(self.periods) < 2 or len(set(self.periods[:-1])) != 1 or self.last is None:
            return None
        period = self.periods[0]
        divisions = [d for c in self.last.live for d in c.divisions]
        return period if period > 1 and any(near(d.by, period) for d in divisions) else None


def kept(at: Place | None, how: str, stale: int, update: int) -> Finding:
    return Finding(
        rule="skipped-gradients-kept",
        severity="error",
        at=at,
        update=update,
        message=f"{how} were added to them: every later update is spoiled too",
        evidence={"stale_contributions": stale},
        fix="call optimizer.zero_grad() after every attempted update, skipped or not",
    )
