"""The run as its updates: events folded into who contributed what to which update.

The story is what checks ask. It is bounded: contributions are kept while they are pending in some optimizer's
gradients (at most a few hundred), and a short tail of finished updates.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from halfstep.events import (
    Attempt,
    Clipped,
    Contribution,
    Event,
    GradientsCleared,
    GradientsEdited,
    HalfUpdate,
    OptimizerMade,
    ParametersChanged,
    ScalerMade,
    ScaleUpdated,
    SchedulerMade,
    SchedulerStepped,
    StateLoaded,
    Unscaled,
)

_KEPT = 512  # contributions remembered in one optimizer's gradients
_TAIL = 64  # finished updates remembered
_MOST = 256  # optimizers, and schedulers, remembered: some scripts make one for each of their tasks

_Kind = TypeVar("_Kind")


@dataclass(slots=True)
class Update:
    """One attempt of one optimizer and what went into it.

    ``contributions``: those added to its gradients since its last attempt; ``erased``: those of them that a clearing
    removed before this attempt; ``stale``: how many contributions of earlier attempts were still in the gradients.
    ``between``: every other event of this group that concerns it (unscale, clip, edits, changes), in order.
    """

    number: int
    optimizer: int
    attempt: Attempt
    contributions: tuple[Contribution, ...] = ()
    erased: tuple[Contribution, ...] = ()
    stale: int = 0
    between: tuple[Event, ...] = ()

    @property
    def applied(self) -> bool:
        return self.attempt.outcome == "applied"

    @property
    def live(self) -> tuple[Contribution, ...]:
        """The contributions that the optimizer really used."""
        gone = {c.number for c in self.erased}
        return tuple(c for c in self.contributions if c.number not in gone)


@dataclass(slots=True)
class OptimizerStory:
    made: OptimizerMade | None = None
    pending: list[Contribution] = field(default_factory=list)
    erased: list[Contribution] = field(default_factory=list)
    between: list[Event] = field(default_factory=list)
    stale: int = 0
    attempts: int = 0
    applied: int = 0
    skipped: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    weights: float | None = None  # norm of the parameters after the last attempt, where it was measured
    measured: int = 0
    still: int = 0
    updates: deque[Update] = field(default_factory=lambda: deque(maxlen=_TAIL))

    @property
    def live(self) -> list[Contribution]:
        gone = {c.number for c in self.erased}
        return [c for c in self.pending if c.number not in gone]

    @property
    def is_idle(self) -> bool:
        """Most attempts leave the parameters as they are: it gathers gradients inside and updates now and then."""
        return self.measured >= 4 and self.measured > self.still > self.measured / 2

    def is_cleared_by(self, ident: int, count: int) -> bool:
        """Whether clearing so many parameter tensors clears this optimizer's gradients, not only a part of them."""
        live = self.live
        return 2 * count >= max((c.optimizers.get(ident, 0) for c in live), default=0)

    def usual_size(self) -> int | None:
        """The number of contributions most updates of this optimizer had."""
        return self.sizes.most_common(1)[0][0] if self.sizes else None


@dataclass(slots=True)
class ScalerStory:
    made: ScalerMade | None = None
    scale: float | None = None
    path: list[tuple[int, float]] = field(default_factory=list)  # (attempts so far, scale), on change
    updates: int = 0
    unscaled: dict[int, Unscaled] = field(default_factory=dict)  # optimizer -> since the last update()
    stepped: dict[int, Attempt] = field(default_factory=dict)  # optimizer -> since the last update()
    loaded: bool = False


@dataclass(slots=True)
class SchedulerStory:
    made: SchedulerMade | None = None
    steps: int = 0
    last: SchedulerStepped | None = None


class Story:
    """Fold events with `tell`; ask for optimizers, scalers, schedulers and counters."""

    def __init__(self) -> None:
        self.optimizers: OrderedDict[int, OptimizerStory] = OrderedDict()  # the ones used last at the end
        self.scalers: dict[int, ScalerStory] = {}
        self.schedulers: OrderedDict[int, SchedulerStory] = OrderedDict()
        self.attempted = 0
        self.applied = 0
        self.skipped = 0
        self.empty = 0
        self.micro_batches = 0
        self.weighed = 0
        self.opaque: Counter[str] = Counter()
        self.precisions: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()  # contributions an update, of all optimizers

    def optimizer(self, ident: int) -> OptimizerStory:
        return _kept(self.optimizers, ident, OptimizerStory)

    def scaler(self, ident: int) -> ScalerStory:
        return self.scalers.setdefault(ident, ScalerStory())

    def tell(self, event: Event) -> Update | None:
        """Fold one event; an attempt gives back the update it ended."""
        match event:
            case OptimizerMade():
                self.optimizer(event.optimizer).made = event
            case ScalerMade():
                scaler = self.scaler(event.scaler)
                scaler.made, scaler.scale = event, event.scale
                if event.enabled:
                    scaler.path.append((self.attempted, event.scale))
            case SchedulerMade():
                _kept(self.schedulers, event.scheduler, SchedulerStory).made = event
            case SchedulerStepped():
                schedule = _kept(self.schedulers, event.scheduler, SchedulerStory)
                schedule.steps += 1
                schedule.last = event
            case StateLoaded(kind="scaler", ident=int(ident)):
                self.scaler(ident).loaded = True
            case Contribution():
                self._contribute(event)
            case GradientsCleared():
                for ident, count in event.optimizers.items():
                    self._clear(ident, count)
            case GradientsEdited():
                for ident, count in event.optimizers.items():
                    if event.zeroed:
                        self._clear(ident, count)
                    else:
                        self.optimizer(ident).between.append(event)
            case Clipped() | ParametersChanged():
                for ident in event.optimizers:
                    self._between(ident, event)
            case Unscaled():
                self.scaler(event.scaler).unscaled[event.optimizer] = event
                for ident in event.optimizers or (event.optimizer,):
                    self._between(ident, event)
            case HalfUpdate():
                self._between(event.optimizer, event)
            case ScaleUpdated():
                self._scaled(event)
            case Attempt():
                return self._attempt(event)
            case _:
                pass
        return None

    def _between(self, ident: int, event: Event) -> None:
        between = self.optimizer(ident).between
        if len(between) < _KEPT:
            between.append(event)

    def _contribute(self, event: Contribution) -> None:
        self.micro_batches += 1
        if event.opaque is None:
            self.weighed += 1
        else:
            self.opaque[f"{event.at.file}:{event.at.line}" if event.at else "?"] += 1
        self.precisions[event.autocast or "float32"] += 1
        for ident in event.optimizers:
            story = self.optimizer(ident)
            story.pending.append(event)
            if len(story.pending) > _KEPT:
                del story.pending[0]
                story.stale += 1

    def _clear(self, ident: int, count: int) -> None:
        story = self.optimizer(ident)
        if not story.is_cleared_by(ident, count):
            return
        story.erased = list(story.pending)
        story.stale = 0

    def _scaled(self, event: ScaleUpdated) -> None:
        scaler = self.scaler(event.scaler)
        scaler.updates += 1
        scaler.unscaled.clear()
        scaler.stepped.clear()
        if event.after is not None and event.after != scaler.scale:
            scaler.path.append((self.attempted, event.after))
        scaler.scale = event.after
        for story in self.optimizers.values():
            if story.live and len(story.between) < _KEPT:
                story.between.append(event)

    def _attempt(self, event: Attempt) -> Update:
        story = self.optimizer(event.optimizer)
        story.attempts += 1
        self.attempted += 1
        if event.outcome == "applied":
            story.applied += 1
            self.applied += 1
        elif event.outcome == "empty":
            self.empty += 1
        else:
            story.skipped += 1
            self.skipped += 1
        if event.weights is not None:
            story.measured += story.weights is not None
            story.still += story.weights == event.weights and event.outcome == "applied"
            story.weights = event.weights
        if event.scaler is not None:
            self.scaler(event.scaler).stepped[event.optimizer] = event
        update = Update(
            number=story.attempts,
            optimizer=event.optimizer,
            attempt=event,
            contributions=tuple(story.pending),
            erased=tuple(story.erased),
            stale=story.stale,
            between=tuple(story.between),
        )
        story.sizes[len(update.live)] += 1
        self.sizes[len(update.live)] += 1
        story.updates.append(update)
        story.stale += len(update.live)  # until something clears them, they stay in the gradients
        story.pending.clear()
        story.erased.clear()
        story.between.clear()
        return update


def _kept(memory: OrderedDict[int, _Kind], ident: int, new: Callable[[], _Kind]) -> _Kind:
    """What is told of ``ident``, or something new; the one left alone longest goes where they are too many."""
    known = memory.get(ident)
    if known is None:
        if len(memory) >= _MOST:
            memory.popitem(last=False)
        known = memory[ident] = new()
    else:
        memory.move_to_end(ident)
    return known
