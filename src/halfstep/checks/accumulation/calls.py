"""Order of calls within a group: cleared, stepped, kept or mixed with another loss's gradients at the wrong time.

What counts is what the gradients went through, not which verb did it: ``zero_grad``, ``p.grad = None`` and zeroing by
hand are one. An optimizer driven by a closure, a two-step one (SAM), and gradients that the script takes out, edits
and puts back (several tasks, private training) are left alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.checks.accumulation.evidence import recall
from halfstep.checks.accumulation.habits import Habit, kept
from halfstep.checks.accumulation.weights import is_driven, strands
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Clipped,
    Contribution,
    Event,
    Finding,
    GradientsCleared,
    GradientsEdited,
    GradientsRead,
    HalfSums,
    HalfUpdate,
    ModuleCalled,
    ParametersChanged,
    Place,
    Unscaled,
)

_MANY = 16  # contributions whose sum in BF16 is off by more than one contribution's own rounding
_FEW = 64
_REMEMBERED = 1024  # contributions whose fate or origin is remembered
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
    edited: bool = False  # by more than a factor, after the last contribution
    cleared: int = 0  # parameter tensors, by all clearings
    cleared_at: Place | None = None
    probes: list[Contribution] = field(default_factory=list)  # from forwards in evaluation mode
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
        self._habits: dict[int, Habit] = {}
        self._used: OrderedDict[int, dict[int, int]] = OrderedDict()  # contribution -> optimizer -> seq of its attempt
        self._modes: dict[int, bool] = {}  # optimizer -> whether its parameters' last forward was in training mode
        self._told: dict[int, int] = {}  # optimizer -> the last NaN contribution told to be kept

    def _group(self, ident: int) -> _Group:
        return recall(self._groups, ident, _Group)

    def _habit(self, ident: int) -> Habit:
        return recall(self._habits, ident, Habit)

    # -- between attempts ----------------------------------------------------------------------------------------

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case GradientsCleared() | GradientsEdited(zeroed=True):
                self._cleared(event, story)
            case GradientsEdited(factor=None):
                for ident in event.optimizers:
                    self._group(ident).edited = True
            case ModuleCalled(grad_enabled=True) if event.optimizers:
                self._modes.update(dict.fromkeys(event.optimizers, event.training))
            case Contribution():
                for ident in event.optimizers:
                    self._contributed(ident, event, story)
                    if self._modes.pop(ident, True) is False:
                        self._group(ident).probes.append(event)
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
            case HalfSums():
                yield _summed(event.dtype, event.parameters, event.contributions, event.at, None)
            case _:
                pass

    def _cleared(self, event: GradientsCleared | GradientsEdited, story: Story) -> None:
        for ident, count in event.optimizers.items():
            live, group = tuple(story.optimizer(ident).live), self._group(ident)
            group.cleared += count
            group.cleared_at = event.at or group.cleared_at
            if not story.optimizer(ident).is_cleared_by(ident, count):
                continue
            if live and not (group.nonfinite or (isinstance(event, GradientsCleared) and event.nonfinite)):
                group.clears.append(_Clear(event.seq, event.at, live))
            group.nonfinite = None
            group.edited = False
            self._habit(ident).cleared(event.seq, event.at, isinstance(event, GradientsEdited))

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
            if optimizer.live and optimizer.live[-1].route == event.route:
                # Between backwards at two lines the script moves them on purpose: an adversary, that it takes back.
                group.moves.append((group.moved.at or event.at, group.moved.operator))
            group.moved = None

    def _spoiled(self, ident: int, at: Place) -> None:
        """A contribution was added to gradients that the script knew to be non-finite."""
        how = "gradients found non-finite here were kept, the next contributions"
        self._habit(ident).kept.add(kept(at if at.line else None, how, 0, 1))

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
        if not habit.zeroes:
            self._foreign(update, habit)
            self._probed(update, group, habit)
        self._moved(update, group, habit)
        self._kept(update, habit)
        self._partly(update, group, habit)
        self._half(update, story, habit)
        habit.attempted(update)
        if not story.optimizer(ident).is_idle:
            yield from habit.firm()

    def end(self, story: Story) -> Iterable[Finding]:
        for ident, habit in self._habits.items():
            if not habit.closure and not story.optimizer(ident).is_idle:
                yield from habit.rest()

    def _zero_grad(self, update: Update, group: _Group, habit: Habit) -> None:
        habit.zeroed.chance()
        began = update.contributions[0].seq if update.contributions else 0
        if group.edited or any(isinstance(e, ParametersChanged) and e.seq > began for e in update.between):
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

    def _foreign(self, update: Update, habit: Habit) -> None:
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

    def _probed(self, update: Update, group: _Group, habit: Habit) -> None:
        """A backward in evaluation mode (a saliency map, an attack, a metric) left gradients for the next update."""
        live = update.live
        if len(live) < 2 or live[-1] in group.probes or len(group.probes) > _FEW:
            return
        left = next((c for c in live if c in group.probes and c.route != live[-1].route), None)
        if left is None:
            return
        habit.probed.add(
            Finding(
                rule="foreign-gradients",
                severity="warning",
                at=left.at,
                update=update.number,
                message=(
                    f"this backward ran on a forward in evaluation mode and left gradients in "
                    f"{left.optimizers.get(update.optimizer)} parameters; the next update used them"
                ),
                evidence={"parameters": left.optimizers.get(update.optimizer), "contributions": len(live)},
                fix="clear gradients before the next training backward, or take them with torch.autograd.grad",
            )
        )

    def _moved(self, update: Update, group: _Group, habit: Habit) -> None:
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

    def _kept(self, update: Update, habit: Habit) -> None:
        """Gradients of a skipped attempt under the next contributions."""
        skipped = habit.skipped_since_clear
        if update.stale and skipped is not None and update.live and not habit.never_clears:
            how = "the gradients of a skipped update were kept, the next contributions"
            habit.kept.add(kept(habit.usual_clear or skipped.at, how, update.stale, update.number))

    def _partly(self, update: Update, group: _Group, habit: Habit) -> None:
        """Clearings that leave out some of the parameters, update after update."""
        held, habit.held = habit.held, update.attempt.gradients or 0
        reached = max((c.optimizers.get(update.optimizer, 0) for c in update.live), default=0)
        if not held or not held == reached == habit.held:
            return  # not all the same parameters again
        habit.partly.chance()
        if not 0 < group.cleared < held or habit.zeroes:
            return
        left = held - group.cleared
        habit.partly.add(
            Finding(
                rule="gradients-never-cleared",
                severity="error",
                at=group.cleared_at or update.attempt.at,
                update=update.number,
                message=(
                    f"only {group.cleared} of the optimizer's {held} gradients are cleared between updates: those of "
                    f"{left} parameters add up over the whole run"
                ),
                evidence={"cleared": group.cleared, "gradients": held, "never_cleared": left},
                fix="optimizer.zero_grad(): it clears every parameter that the optimizer owns",
            )
        )

    def _half(self, update: Update, story: Story, habit: Habit) -> None:
        made = story.optimizer(update.optimizer).made
        half = {d: n for d, n in (made.dtypes if made else {}).items() if d in ("bfloat16", "float16")}
        size = len(update.live)
        if size < _MANY // 2 or not half:
            return
        kind, tensors = max(half.items(), key=lambda entry: entry[1])
        habit.half.add(_summed(kind, tensors, size, update.live[-1].at, update.number))


def _summed(kind: str, tensors: int, size: int, at: Place | None, number: int | None) -> Finding:
    return Finding(
        rule="half-gradient-accumulation",
        severity="warning" if size >= _MANY else "info",
        at=at,
        update=number,
        message=(
            f"gradients of {tensors} parameters are summed in {kind} over {size} contributions: late ones are rounded "
            "away against the sum so far"
        ),
        evidence={"dtype": kind, "parameters": tensors, "contributions": size},
        fix="keep parameters in float32 under autocast, or add each micro-batch's gradients to float32 buffers",
    )


def _is_nan(contribution: Contribution) -> bool:
    """Its loss and so its gradients are NaN; not where nothing was supervised, whose gradients may be zero."""
    loss = contribution.loss
    return loss is not None and math.isnan(loss) and all(s.supervised != 0 for s in contribution.shares)


def _unfinished(update: Update, lost: int) -> bool:
    """What is left adds up to less than one, and what was cleared would have completed it."""
    found = strands(update)
    main = found[0].main if len(found) == 1 and found[0].weighed and not found[0].edited else None
    parts = main.parts() if main is not None else None
    return parts is not None and len(update.live) < parts <= len(update.live) + lost
