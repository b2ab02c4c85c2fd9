"""What multiplies an optimizer's gradients at a moment, told from the events of its group."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from halfstep.checks.story import OptimizerStory, Update
from halfstep.events import Contribution, Event, GradientsEdited, Place, ScaleRead, ScaleUpdated, Unscaled

_MULTIPLIERS = ("mul", "div", "_foreach_mul", "_foreach_div")
_CLOSE = 2e-3


@dataclass(slots=True)
class Carried:
    """``scale``: the loss scale on the gradients now (None: none that was seen); ``scaler``: whose.

    ``unknown``: the script changed the gradients where nobody looked, so no scale may be claimed.
    ``unscaled``: what took the scale off last: `unscale_`, or an edit by hand. ``late``: contributions that came after
    it, carrying the scale again. ``mixed``: contributions of different scales are added up.
    """

    scale: float | None = None
    scaler: int | None = None
    unknown: bool = False
    unscaled: Unscaled | GradientsEdited | None = None
    late: list[Contribution] = field(default_factory=list)
    mixed: bool = False
    plain: int = 0

    @property
    def scaled(self) -> bool:
        """Whether the gradients surely carry a scale that is not 1."""
        return self.scale is not None and self.scale != 1.0 and not self.unknown


def carried(group: OptimizerStory | Update, before: int | None = None) -> Carried:
    """What the gradients of this group carry, at its end or just before the event numbered ``before``."""
    return _fold(group.live, group.between, before)


def _fold(live: Sequence[Contribution], between: Sequence[Event], before: int | None) -> Carried:
    now = Carried()
    for event in heapq.merge(live, between, key=lambda e: e.seq):
        if before is not None and event.seq >= before:
            break
        match event:
            case Contribution():
                _add(now, event)
            case Unscaled():
                if now.scale is not None:
                    now.unscaled, now.scale = event, None
                    now.late = []
            case GradientsEdited():
                _edit(now, event)
            case _:
                pass
    return now


def _add(now: Carried, event: Contribution) -> None:
    if event.scale is None:
        now.plain += 1
        return
    if now.unscaled is not None:
        now.late.append(event)
        now.mixed = True
    if now.scale is not None and now.scale != event.scale:
        now.mixed = True
    now.scale, now.scaler = event.scale, event.scaler


def _edit(now: Carried, event: GradientsEdited) -> None:
    if event.operator is None:
        now.unknown = True
    elif event.operator.startswith(_MULTIPLIERS):
        if event.factor is None:
            now.unknown = True
        elif now.scale is not None and abs(event.factor * now.scale - 1) < _CLOSE:
            now.unscaled, now.scale = event, None
            now.late = []


class ScaleReads:
    """When the script asked for the scale: it may have computed with it what no operator shows."""

    def __init__(self) -> None:
        self._since: list[ScaleRead] = []  # since the scale was last updated
        self.ever = False

    def see(self, event: Event) -> None:
        match event:
            case ScaleRead():
                self.ever = True
                self._since.append(event)
                del self._since[:-32]
            case ScaleUpdated():
                self._since.clear()
            case _:
                pass

    def computing(self) -> bool:
        """Whether a line computed with the scale since its last update."""
        return any(e.how == "computing" for e in self._since)

    def known_at(self, at: Place | None) -> bool:
        """Whether the script may hold the scale in a variable when it comes to this line."""
        return any(
            e.how == "computing"
            or (
                e.how == "plain"
                and (e.at is None or at is None or e.at.function != at.function or e.at.line <= at.line)
            )
            for e in self._since
        )


def same_line(events: Iterable[Contribution]) -> bool:
    """Whether these contributions come from one line by one way, as the micro-batches of a loop do."""
    return len({((e.at.file, e.at.line) if e.at else None, e.route) for e in events}) == 1
