"""The order of unscale_, step and update within a group, where torch lets a wrong one pass."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.checks.accumulation.weights import later_factor, near, terms
from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling.carried import Carried, carried
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Attempt,
    Contribution,
    Event,
    Finding,
    GradientsCleared,
    GradientsEdited,
    HalfUpdate,
    ParametersChanged,
    Place,
    ScaleUpdated,
    Unscaled,
)

_STUCK = 3  # overflows in a row that a script discards without the scaler hearing of them


class UnscaleMidGroup(BaseCheck):
    """Unscaled before the group's last contribution: later ones are added at another scale."""

    rules = ("unscale-mid-group",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if not isinstance(event, Contribution) or event.scale is None:
            return
        for ident in event.optimizers:
            now = carried(story.optimizer(ident))
            early = now.unscaled
            if early is None or now.late or now.unknown or (isinstance(early, Unscaled) and early.in_step):
                continue
            before = [c for c in story.optimizer(ident).live if c.seq < early.seq]
            if not before or not _same_parameters(before, event, ident):
                continue
            how = "unscale_" if isinstance(early, Unscaled) else "dividing by the scale"
            yield Finding(
                rule="unscale-mid-group",
                severity="error",
                at=early.at,
                update=story.optimizer(ident).attempts + 1,
                message=(
                    f"{how} ran after contribution {len(before)} of a group that went on: the next one was added while "
                    f"multiplied by {event.scale:g}, so the earlier ones weigh 1/{event.scale:g} as much"
                ),
                evidence={"contributions_before": len(before), "scale": event.scale, "optimizer": ident},
                fix="call scaler.unscale_(optimizer) (and clip) only after the group's last backward",
            )
            return


def _same_parameters(before: list[Contribution], event: Contribution, ident: int) -> bool:
    reached = event.reached.get(ident)
    return any(c.reached.get(ident) == reached for c in before)


class ScaleMovesMidGroup(BaseCheck):
    """`update()` while gradients made under the scale are pending, in one optimizer or between two."""

    rules = ("scaler-update-mid-group", "scaler-update-between-optimizers")

    def __init__(self) -> None:
        self._attempts: list[Attempt] = []  # through a scaler, in order

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempts = [a for a in self._attempts if a.optimizer != update.optimizer]
        if update.attempt.scaler is not None:
            self._attempts.append(update.attempt)
            del self._attempts[:-16]
        told: set[Place | None] = set()
        for event in update.between:
            if not isinstance(event, ScaleUpdated) or event.at in told:
                continue
            waiting = [c for c in update.live if c.seq < event.seq and c.scaler == event.scaler]
            now = carried(update, event.seq)
            if not waiting or (now.scale is None and not _unscaled_here(now)) or now.unknown:
                continue
            told.add(event.at)
            later = [c for c in update.live if c.seq > event.seq]
            stepped = [a for a in attempts if a.scaler == event.scaler and waiting[0].seq < a.seq < event.seq]
            if stepped and not later:
                yield self._between(event, update, stepped[-1])
            else:
                yield self._mid_group(event, update, waiting, later, now)

    @staticmethod
    def _mid_group(
        event: ScaleUpdated, update: Update, waiting: list[Contribution], later: list[Contribution], now: Carried
    ) -> Finding:
        moved = f" (it went from {event.before:g} to {event.after:g})" if _moved(event) else ""
        again = "" if now.scale is not None else "; the gradients were unscaled already, and step() divides them again"
        return Finding(
            rule="scaler-update-mid-group",
            severity="error",
            at=event.at,
            update=update.number,
            message=(
                f"the scale may move here{moved} while {len(waiting)} contributions are pending and "
                f"{len(later)} more follow before the update{again}"
            ),
            evidence={"before": event.before, "after": event.after, "pending": len(waiting), "following": len(later)},
            fix="call scaler.update() once a group, after scaler.step(optimizer)",
        )

    @staticmethod
    def _between(event: ScaleUpdated, update: Update, other: Attempt) -> Finding:
        moved = f": it went from {event.before:g} to {event.after:g}" if _moved(event) else ""
        return Finding(
            rule="scaler-update-between-optimizers",
            severity="error",
            at=event.at,
            update=update.number,
            message=(
                f"update() ran after optimizer {other.optimizer} and before optimizer {update.optimizer}, whose "
                f"gradients come from the same scale{moved}; the second is divided by another number"
            ),
            evidence={"before": event.before, "after": event.after, "optimizers": [other.optimizer, update.optimizer]},
            fix="call scaler.update() once, after the last scaler.step(...) of the iteration",
        )


def _moved(event: ScaleUpdated) -> bool:
    return event.before is not None and event.after is not None and event.before != event.after


def _unscaled_here(now: Carried) -> bool:
    """Unscaled by the scaler in this group: update() forgets it, and step() would divide again."""
    return isinstance(now.unscaled, Unscaled) and not now.unscaled.in_step


class StepBypassesScaler(BaseCheck):
    """`optimizer.step()` on gradients that carry the scale, or once more on those the scaler has stepped."""

    rules = ("optimizer-step-bypasses-scaler",)

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt = update.attempt
        if attempt.via != "optimizer" or attempt.closure or attempt.divided_by is not None or not update.applied:
            return
        if attempt.managed:
            return
        now = carried(update)
        if is_two_step(update):
            return
        managed = any(c.managed for c in update.live)
        verb = "manager.step(model, optimizer)" if managed else "scaler.step(optimizer)"
        owed = _owed(update)
        if now.scaled and now.scale is not None:
            norm = f" (norm {attempt.norm:.3g})" if attempt.norm is not None else ""
            message = f"optimizer.step() used gradients that are multiplied by the loss scale {now.scale:g}{norm}"
        elif owed is not None:
            message = (
                "optimizer.step() used gradients that manager.step has still to divide by the group's weight: their "
                f"coefficients add up to {owed:.4g}"
            )
        elif self._again(update, story):
            message = (
                "optimizer.step() was called on gradients that scaler.step(optimizer) had just used: two updates for "
                "one backward, and what the scaler skips is applied all the same"
            )
        elif attempt.nonfinite and isinstance(now.unscaled, Unscaled) and now.unscaled.found_inf:
            message = "optimizer.step() applied gradients in which unscale_ had found inf or NaN: nothing was skipped"
        else:
            return
        yield Finding(
            rule="optimizer-step-bypasses-scaler",
            severity="error",
            at=attempt.at,
            update=update.number,
            message=message,
            evidence={"scale": now.scale, "norm": attempt.norm, "nonfinite": attempt.nonfinite, "undivided": owed},
            fix=f"{verb}  # in place of optimizer.step()",
        )

    @staticmethod
    def _again(update: Update, story: Story) -> bool:
        if update.live or not update.stale or any(isinstance(e, GradientsEdited) for e in update.between):
            return False
        earlier = [u for u in story.optimizer(update.optimizer).updates if u.number < update.number]
        return bool(earlier) and earlier[-1].attempt.via == "scaler" and bool(earlier[-1].live)


def _owed(update: Update) -> float | None:
    """What the coefficients add up to that halfstep's engine was still to divide; None where that is 1 or not known."""
    if not any(c.undivided for c in update.live) or later_factor(update) != 1.0:
        return None
    for term in terms(update.live):
        if term.known and not near(term.total, 1.0):
            return term.total
    return None


def is_two_step(update: Update) -> bool:
    """Whether parameters were moved between two contributions and put back, as SAM does within one update."""
    if any(isinstance(e, HalfUpdate) for e in update.between):
        return True
    gone = [c.seq for c in update.erased]
    live = [c.seq for c in update.live]
    return any(
        isinstance(e, ParametersChanged) and gone and live and min(gone) < e.seq < max(live) for e in update.between
    )


class OverflowsUnheard(BaseCheck):
    """A hand-made skip: overflowed gradients are discarded, and no `update()` lowers the scale.

    With an `unscale_` before it torch raises at the next one (see `exceptions`); without, the script skips for ever.
    """

    rules = ("scaler-update-missing",)

    def __init__(self) -> None:
        self._missed: dict[int, list[GradientsCleared]] = {}  # scaler -> overflows discarded since its last attempt

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case Attempt(scaler=int(scaler)):
                self._missed.pop(scaler, None)
            case ScaleUpdated():
                self._missed.pop(event.scaler, None)
            case GradientsCleared(nonfinite=True):
                yield from self._discarded(event, story)
            case _:
                pass

    def _discarded(self, event: GradientsCleared, story: Story) -> Iterable[Finding]:
        scalers = {c.scaler for ident in event.optimizers for c in story.optimizer(ident).live if c.scaler is not None}
        for scaler in scalers:
            missed = self._missed.setdefault(scaler, [])
            missed.append(event)
            if len(missed) < _STUCK:
                continue
            del missed[:-_STUCK]
            yield Finding(
                rule="scaler-update-missing",
                severity="error",
                at=event.at,
                count=_STUCK if len(missed) == _STUCK else 1,
                message=(
                    f"overflowed gradients were discarded {_STUCK} times in a row with neither scaler.step() nor "
                    f"scaler.update(): the scale stays at {story.scaler(scaler).scale or 0:g} and every update is lost"
                ),
                evidence={"scale": story.scaler(scaler).scale, "discarded": len(missed)},
                fix="let scaler.step(optimizer) skip and call scaler.update() every time",
            )


class StaleUnscale(BaseCheck):
    """`scaler.step()` that took an `unscale_` of discarded gradients for this group's: a skip without `update()`."""

    rules = ("scaler-update-missing",)

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt, now = update.attempt, carried(update)
        if attempt.via != "scaler" or attempt.divided_by is not None or not now.scaled or is_two_step(update):
            return
        stale = [e for e in update.between if isinstance(e, Unscaled) and not e.in_step]
        if not stale or now.unscaled is not None or not update.applied:
            return
        yield Finding(
            rule="scaler-update-missing",
            severity="error",
            at=stale[-1].at,
            update=update.number,
            message=(
                f"the gradients this unscale_ divided were discarded with no scaler.update(); the next step took its "
                f"own for unscaled and applied them multiplied by {now.scale:g}"
            ),
            evidence={"scale": now.scale, "norm": attempt.norm},
            fix="call scaler.update() after every unscale_, also when the update is skipped by hand",
        )
