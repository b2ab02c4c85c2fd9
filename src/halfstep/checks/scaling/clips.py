"""Clipping: of scaled gradients, after the update that used them, in the middle of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling.carried import ScaleReads, carried, same_line
from halfstep.checks.story import OptimizerStory, Story, Update
from halfstep.events import Clipped, Contribution, Event, Finding, GradientsEdited, Place

_KNOWN = 1e-3  # limit / scale from which a limit carries the scale, if the script knew the scale
_GUESSED = 0.1  # the same where it did not ask for it (a constant written twice)
_TWICE = 2


class ClipScaledGradients(BaseCheck):
    """Clipped by norm or value while multiplied by the loss scale; a threshold that is itself scaled is right."""

    rules = ("clip-scaled-gradients",)

    def __init__(self) -> None:
        self._reads = ScaleReads()
        self._limits: dict[tuple[str, int], tuple[float, float]] = {}  # place -> the first limit and scale seen there
        self._asked: set[tuple[str, int]] = set()  # places that knew the scale

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        self._reads.see(event)
        if not isinstance(event, Clipped) or not math.isfinite(event.limit):
            return
        for ident in event.optimizers:
            now = carried(story.optimizer(ident))
            if not now.scaled or now.scale is None or self._carries(event, now.scale):
                continue
            received = min(event.limit, event.norm if event.norm is not None else math.inf) / now.scale
            each = "an element" if event.kind == "value" else "a norm"
            managed = any(c.managed for c in story.optimizer(ident).live)
            did, fix = (
                "received",
                "scaler.unscale_(optimizer)  # once, after the group's last backward and before clipping",
            )
            if managed:  # which refuses the update, or clips by itself
                did, fix = "would have received", "leave it to manager.step, which clips once and unscaled: "
                fix += f"MixedPrecisionManager(max_norm={event.limit:g})"
            yield Finding(
                rule="clip-scaled-gradients",
                severity="error",
                at=event.at,
                message=(
                    f"clipped to {event.limit:g} while multiplied by the loss scale {now.scale:g}: "
                    f"the optimizer {did} {each} of at most {received:.2g}"
                ),
                evidence={"limit": event.limit, "scale": now.scale, "norm": event.norm, "received": received},
                fix=fix,
            )
            return

    def _carries(self, event: Clipped, scale: float) -> bool:
        """Whether the limit carries the scale too."""
        at = event.at
        key = (at.file, at.line) if at else ("", 0)
        limit, first = self._limits.setdefault(key, (event.limit, scale))
        if first != scale and limit == event.limit:
            return False  # the scale moved, the limit did not
        if first != scale and abs(event.limit / limit * first / scale - 1) < 1e-3:
            return True
        if self._reads.known_at(at):
            self._asked.add(key)  # reads of the scale are told only so often for one line
        return event.limit / scale >= (_KNOWN if key in self._asked else _GUESSED)


class ClipAfterUpdate(BaseCheck):
    """Clipping that came after the update which used the gradients: it changes nothing that is used."""

    rules = ("clip-after-update",)

    def __init__(self) -> None:
        self._last: int | None = None  # the optimizer that was stepped last
        self._unclipped: dict[int, bool] = {}  # optimizer -> its last attempt used gradients that nobody clipped
        self._seen: dict[tuple[str, int], list[Finding]] = {}
        self._norms: dict[int, float | None] = {}  # optimizer -> the norm its last attempt received
        self._factors: dict[tuple[str, int], tuple[float, float]] = {}  # place -> the last factor, and its limit

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, GradientsEdited):
            event = self._as_clip(event) or event
        if not isinstance(event, Clipped) or not math.isfinite(event.limit):
            return
        idents = list(event.optimizers) or ([self._last] if self._last is not None else [])
        if not idents or not all(self._idle(story.optimizer(i)) and self._unclipped.get(i) for i in idents):
            return
        if not event.optimizers and any(o.live for o in story.optimizers.values()):
            return
        at = event.at
        norm = f"; the norm it found was {event.norm:.3g}" if event.norm is not None else ""
        finding = Finding(
            rule="clip-after-update",
            severity="error",
            at=at,
            update=story.optimizer(idents[0]).attempts,
            message=(
                f"gradients were clipped to {event.limit:g} after the update that used them: no update was ever "
                f"clipped here{norm}"
            ),
            evidence={"limit": event.limit, "norm": event.norm, "attempts": story.optimizer(idents[0]).attempts},
            fix="clip between the last backward of the group and optimizer.step()",
        )
        seen = self._seen.setdefault((at.file, at.line) if at else ("", 0), [])
        seen.append(finding)
        if len(seen) == _TWICE:
            yield from seen
        elif len(seen) > _TWICE:
            del seen[_TWICE:]
            yield finding
            seen.append(finding)

    def _as_clip(self, event: GradientsEdited) -> Clipped | None:
        """Factors that differ and bring the norms of the last attempts down to one limit: clipping by hand."""
        norm = next((self._norms.get(ident) for ident in event.optimizers), None)
        factor, at = event.factor, event.at
        if norm is None or at is None or factor is None or not 0 < factor < 1:
            return None
        limit, key = factor * norm, (at.file, at.line)
        before = self._factors.get(key)
        self._factors[key] = (factor, limit)
        if before is None or abs(before[1] / limit - 1) > 0.01 or abs(before[0] / factor - 1) < 0.01:
            return None
        return Clipped(at=at, kind="norm", limit=limit, norm=norm, optimizers=event.optimizers, by_hand=True)

    @staticmethod
    def _idle(optimizer: OptimizerStory) -> bool:
        """Nothing waits in its gradients, neither by backward nor put there by hand."""
        return (
            optimizer.attempts > 0
            and not optimizer.live
            and not any(isinstance(e, GradientsEdited) for e in optimizer.between)
        )

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        self._last = update.optimizer
        self._norms[update.optimizer] = update.attempt.norm
        first = min((c.seq for c in update.live), default=0)
        clipped = any(isinstance(e, Clipped) and e.seq > first for e in update.between)
        self._unclipped[update.optimizer] = bool(update.live) and not clipped
        return ()


class ClipMidGroup(BaseCheck):
    """Clipping by norm between contributions of one group: the sum of clipped pieces is not the clipped sum."""

    rules = ("clip-mid-group",)

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        live = update.live
        if len(live) < _TWICE or not same_line(live):
            return
        clips: dict[Place | None, list[Clipped]] = {}
        for event in update.between:
            if isinstance(event, Clipped) and event.kind == "norm" and _between(live, event, update.optimizer):
                clips.setdefault(event.at, []).append(event)
        for at, events in clips.items():
            active = [e for e in events if e.norm is None or e.norm > e.limit]
            yield Finding(
                rule="clip-mid-group",
                severity="error" if active else "warning",
                at=at,
                update=update.number,
                message=(
                    f"clipped {len(events)} times between the {len(live)} contributions of one group"
                    f" ({len(active)} times the norm was above {events[0].limit:g}): the sum was cut before it was"
                    " whole"
                ),
                evidence={"contributions": len(live), "limit": events[0].limit, "norms": [e.norm for e in events][:8]},
                fix="clip once, after the last contribution of the group: inside the `if` that also calls step()",
            )


def _between(live: tuple[Contribution, ...], event: Clipped, ident: int) -> bool:
    if not math.isfinite(event.limit):
        return False  # it only measures
    before = [c for c in live if c.seq < event.seq]
    after = [c for c in live if c.seq > event.seq]
    reached = {c.reached.get(ident) for c in before}
    return bool(before) and any(c.reached.get(ident) in reached for c in after)
