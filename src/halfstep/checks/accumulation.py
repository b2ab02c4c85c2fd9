"""Order of calls within a group: cleared, stepped, kept or mixed with another loss's gradients at the wrong time.

What counts is what the gradients went through, not which verb did it: ``zero_grad``, ``p.grad = None`` and zeroing by
hand are one. An optimizer driven by a closure, a two-step one (SAM), and gradients that the script takes out, edits
and puts back (several tasks, private training) are left alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halfstep.checks.accumulation_evidence import Evidence
from halfstep.checks.accumulation_weights import is_driven, near, strands
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Attempt,
    Clipped,
    Contribution,
    Event,
    Finding,
    GradientsCleared,
    GradientsEdited,
    GradientsRead,
    HalfUpdate,
    ParametersChanged,
    Place,
    Unscaled,
)

_MANY = 16  # contributions whose sum in BF16 is off by more than one contribution's own rounding
_PATIENCE = 24  # attempts without a clearing before it is called a habit
_REMEMBERED = 4096
_PASSING = frozenset({"embedding_renorm_"})  # a layer's own bookkeeping on its weight


@dataclass(slots=True)
class _Clear:
    seq: int
    at: Place | None
    erased: tuple[Contribution, ...]


@dataclass(slots=True)
class _Group:
    """What happened to one optimizer's gradients since its last attempt."""

    clears: list[_Clear] = field(default_factory=list)
    nonfinite: Place | None = None
    moved: ParametersChanged | None = None
    moves: list[tuple[Place | None, str | None]] = field(default_factory=list)
    edited: bool = False  # after the last contribution
    halves: bool = False


class Accumulation(BaseCheck):
    rules = (
        "zero-grad-mid-group",
        "gradients-never-cleared",
        "skipped-gradients-kept",
        "foreign-gradients",
        "parameters-change-mid-group",
        "half-gradient-accumulation",
    )

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._habits: dict[int, _Optimizer] = {}
        self._used: OrderedDict[int, dict[int, int]] = OrderedDict()  # contribution -> optimizer -> seq of its attempt
        self._told: dict[int, int] = {}  # optimizer -> the last NaN contribution told to be kept

    def _group(self, ident: int) -> _Group:
        return self._groups.setdefault(ident, _Group())

    def _habit(self, ident: int) -> _Optimizer:
        return self._habits.setdefault(ident, _Optimizer())

    # -- between attempts ----------------------------------------------------------------------------------------

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case GradientsCleared() | GradientsEdited(zeroed=True):
                self._cleared(event, story)
            case GradientsEdited():
                for ident in event.optimizers:
                    self._group(ident).edited = True
            case Contribution():
                for ident in event.optimizers:
                    self._contributed(ident, event, story)
            case ParametersChanged() if event.operator not in _PASSING:
                for ident in event.optimizers:
                    group = self._group(ident)
                    if story.optimizer(ident).live and (group.moved is None or group.moved.at is None):
                        group.moved = event
            case HalfUpdate():
                for group in self._groups.values():
                    group.halves = True
            case Clipped(norm=float(norm)) | GradientsRead(value=float(norm)) if not math.isfinite(norm):
                for ident in event.optimizers:
                    self._group(ident).nonfinite = event.at or Place("", 0)
            case Unscaled(found_inf=True, in_step=False):
                self._group(event.optimizer).nonfinite = event.at or Place("", 0)
            case _:
                pass
        return ()

    def _cleared(self, event: GradientsCleared | GradientsEdited, story: Story) -> None:
        for ident, count in event.optimizers.items():
            live, group = tuple(story.optimizer(ident).live), self._group(ident)
            if not story.optimizer(ident).is_cleared_by(ident, count):
                continue
            if live and not (group.nonfinite or (isinstance(event, GradientsCleared) and event.nonfinite)):
                group.clears.append(_Clear(event.seq, event.at, live))
            group.nonfinite = None
            group.edited = False
            self._habit(ident).cleared(event.seq, event.at)

    def _contributed(self, ident: int, event: Contribution, story: Story) -> None:
        group = self._group(ident)
        group.edited = False
        optimizer = story.optimizer(ident)
        spoilt = [c for c in optimizer.live if _is_nan(c)]
        size = optimizer.usual_size() if optimizer.attempts > 1 else None
        if spoilt and size and len(optimizer.live) >= size and spoilt[0].number > self._told.get(ident, 0):
            # As many contributions as an update has, one of them NaN, and no attempt: the script skipped it itself.
            self._told[ident] = spoilt[0].number
            group.nonfinite = group.nonfinite or spoilt[0].at
        if group.nonfinite is not None:
            self._spoiled(ident, group.nonfinite)
            group.nonfinite = None
        if group.moved is not None:
            if optimizer.live:
                group.moves.append((group.moved.at or event.at, group.moved.operator))
            group.moved = None

    def _spoiled(self, ident: int, at: Place) -> None:
        """A contribution was added to gradients that the script knew to be non-finite."""
        self._habit(ident).kept.add(
            _kept(
                at if at.line else None,
                "gradients found non-finite here were not cleared, the next contributions",
                0,
                1,
            )
        )

    # -- at an attempt -------------------------------------------------------------------------------------------

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        ident, attempt = update.optimizer, update.attempt
        group, habit = self._groups.pop(ident, None) or _Group(), self._habit(ident)
        live = update.live
        for contribution in live:
            self._used.setdefault(contribution.number, {})[ident] = attempt.seq
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        if is_driven(update, story.optimizer(ident).made):
            habit.closure = True
        if habit.closure or group.halves:
            habit.attempted(update)
            return
        self._zero_grad(update, group, habit)
        self._foreign(update, habit)
        self._moved(update, group, habit)
        self._kept(update, habit)
        self._half(update, story, habit)
        habit.attempted(update)
        if not story.optimizer(ident).is_idle:
            yield from habit.firm()

    def end(self, story: Story) -> Iterable[Finding]:
        for ident, habit in self._habits.items():
            if not habit.closure and not story.optimizer(ident).is_idle:
                yield from habit.rest()

    def _zero_grad(self, update: Update, group: _Group, habit: _Optimizer) -> None:
        habit.zeroed.chance()
        if group.edited or any(isinstance(e, ParametersChanged) for e in update.between):
            return  # taken out and put back by hand, or an ascent before the second half
        live, routes = update.live, {c.route for c in update.live}
        own: list[tuple[_Clear, int]] = []
        for clear in group.clears:
            erased = [c for c in clear.erased if not self._used.get(c.number) and (not routes or c.route in routes)]
            if erased:
                own.append((clear, len(erased)))
        if not own:
            return
        lost = sum(n for _, n in own)
        if live and not (self._one_by_one(live, own) or _unfinished(update, lost)):
            return  # the rest of an unfinished group dropped on purpose
        place = own[0][0].at or (live or own[0][0].erased)[-1].at
        rest = f"only {len(live)} of {lost + len(live)} reached the update" if live else "the update received none"
        habit.zeroed.add(
            Finding(
                rule="zero-grad-mid-group",
                severity="error",
                at=place,
                update=update.number,
                message=f"gradients were cleared {len(own)} times within one group: {rest}",
                evidence={"erased": lost, "used": len(live), "clearings": len(own)},
                fix="clear once per group: optimizer.zero_grad() right after optimizer.step()"
                if live
                else "clear after optimizer.step(), not between backward and it",
            )
        )

    def _one_by_one(self, live: tuple[Contribution, ...], own: list[tuple[_Clear, int]]) -> bool:
        """Every contribution but the last was cleared by itself."""
        return len(live) == 1 and all(n == 1 for _, n in own)

    def _foreign(self, update: Update, habit: _Optimizer) -> None:
        """A contribution that another optimizer already stepped on, then one of this optimizer's own loss."""
        habit.foreign.chance()
        live = update.live
        if len(live) < 2:
            return
        own, me = live[-1], update.optimizer
        for left in live[:-1]:
            users = {i: seq for i, seq in self._used.get(left.number, {}).items() if i != me and seq < own.seq}
            if not users or left.route == own.route:
                continue
            if left.optimizers.get(me, 0) < own.optimizers.get(me, 0) or set(own.optimizers) - {me, *users}:
                continue  # it reached only a shared part, or several losses take turns at one trunk
            clear = habit.last_clear_before(left.seq)
            where = f"line {left.at.line}" if left.at else "another backward"
            habit.foreign.add(
                Finding(
                    rule="foreign-gradients",
                    severity="error",
                    at=clear or update.attempt.at,
                    update=update.number,
                    message=(
                        f"gradients of {left.optimizers[me]} parameters come from two losses: that of {where}, which "
                        "another optimizer had already stepped on, and this optimizer's own"
                    ),
                    evidence={
                        "parameters": left.optimizers[me],
                        "foreign_line": left.at.line if left.at else None,
                        "own_line": own.at.line if own.at else None,
                    },
                    fix="call zero_grad() on this optimizer right before its own loss's backward()",
                )
            )
            return

    def _moved(self, update: Update, group: _Group, habit: _Optimizer) -> None:
        if len(update.live) < 2:
            return
        habit.moved.chance()
        if not group.moves:
            return
        at, operator = group.moves[0]
        habit.moved.add(
            Finding(
                rule="parameters-change-mid-group",
                severity="error",
                at=at,
                update=update.number,
                message=(
                    f"parameters changed {len(group.moves)} times between the {len(update.live)} contributions of one "
                    "group" + (f" (by {operator})" if operator else "") + ": its gradients belong to different weights"
                ),
                evidence={"changes": len(group.moves), "micro_batches": len(update.live), "operator": operator},
                fix="change parameters once per update, next to optimizer.step()",
                operator=operator,
            )
        )

    def _kept(self, update: Update, habit: _Optimizer) -> None:
        """Gradients of a skipped attempt under the next contributions."""
        skipped = habit.skipped_since_clear
        if update.stale and skipped is not None and update.live and not habit.never_clears:
            how = "the gradients of a skipped update were kept, the next contributions"
            habit.kept.add(_kept(habit.usual_clear or skipped.at, how, update.stale, update.number))

    def _half(self, update: Update, story: Story, habit: _Optimizer) -> None:
        made = story.optimizer(update.optimizer).made
        half = {d: n for d, n in (made.dtypes if made else {}).items() if d in ("bfloat16", "float16")}
        size = len(update.live)
        if size < _MANY // 2 or not half:
            return
        kind, tensors = max(half.items(), key=lambda entry: entry[1])
        habit.half.add(
            Finding(
                rule="half-gradient-accumulation",
                severity="warning" if size >= _MANY else "info",
                at=update.live[-1].at,
                update=update.number,
                message=(
                    f"gradients of {tensors} parameters are summed in {kind} over {size} contributions: late ones are "
                    "rounded away against the sum so far"
                ),
                evidence={"dtype": kind, "parameters": tensors, "contributions": size},
                fix="keep parameters in float32 under autocast, or add each micro-batch's gradients to float32 buffers",
            )
        )


def _is_nan(contribution: Contribution) -> bool:
    """Its loss and so its gradients are NaN; not where nothing was supervised, whose gradients may be zero."""
    loss = contribution.loss
    return loss is not None and math.isnan(loss) and all(s.supervised != 0 for s in contribution.shares)


def _kept(at: Place | None, how: str, stale: int, update: int) -> Finding:
    return Finding(
        rule="skipped-gradients-kept",
        severity="error",
        at=at,
        update=update,
        message=f"{how} were added to them: every later update is spoiled too",
        evidence={"stale_contributions": stale},
        fix="call optimizer.zero_grad() after every attempted update, skipped or not",
    )


def _unfinished(update: Update, lost: int) -> bool:
    """What is left adds up to less than one, and what was cleared would have completed it."""
    found = strands(update)
    main = found[0].main if len(found) == 1 and found[0].weighed and not found[0].edited else None
    parts = main.parts() if main is not None else None
    return parts is not None and len(update.live) < parts <= len(update.live) + lost


@dataclass(slots=True)
class _Optimizer:
    """What one optimizer's updates have been like."""

    zeroed: Evidence = field(default_factory=lambda: Evidence(least=3))
    foreign: Evidence = field(default_factory=lambda: Evidence(least=2))
    moved: Evidence = field(default_factory=lambda: Evidence(least=2))
    kept: Evidence = field(default_factory=lambda: Evidence(least=1, share=0.0))
    half: Evidence = field(default_factory=lambda: Evidence(least=1, share=0.0))
    closure: bool = False
    clears: list[tuple[int, Place | None]] = field(default_factory=list)  # the last few: seq, place
    usual_clear: Place | None = None  # the last that came after an attempt
    since: list[Update] = field(default_factory=list)  # attempts on new contributions since the last clearing
    periods: list[int] = field(default_factory=list)
    skipped_since_clear: Attempt | None = None
    longest: int = 0
    uncleared: Finding | None = None
    stale: int = 0  # attempts on gradients of earlier ones
    told: int = 0
    last: Update | None = None

    def cleared(self, seq: int, at: Place | None) -> None:
        self.clears = [*self.clears[-15:], (seq, at)]
        if self.since:
            self.periods = [*self.periods[-63:], len(self.since)]
            self.usual_clear = at
        self.since = []
        self.skipped_since_clear = None

    @property
    def never_clears(self) -> bool:
        return not self.periods and any(u.applied for u in self.since)

    def last_clear_before(self, seq: int) -> Place | None:
        return next((at for number, at in reversed(self.clears) if number < seq), None)

    def attempted(self, update: Update) -> None:
        if not update.live:
            return
        self.last = update
        if any(isinstance(e, GradientsEdited) for e in update.between):
            self.since = []  # the script does something of its own with them
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

    def firm(self) -> Iterator[Finding]:
        for evidence in (self.zeroed, self.foreign, self.moved, self.kept, self.half):
            yield from evidence.firm()
        if self.uncleared is not None and self.longest >= _PATIENCE:
            yield from self._tell_uncleared()

    def rest(self) -> Iterator[Finding]:
        for evidence in (self.zeroed, self.foreign, self.moved, self.kept, self.half):
            yield from evidence.rest()
        if self.uncleared is None or self.longest < 3:
            return
        yield from self._tell_uncleared()

    def _tell_uncleared(self) -> Iterator[Finding]:
        if self.uncleared is None or self.stale == self.told:
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
