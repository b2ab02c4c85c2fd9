"""A scaler's life: made again in the middle of a run, or not restored when a run resumes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Attempt,
    Event,
    Finding,
    ScalerMade,
    ScaleUpdated,
    StateLoaded,
    StateSaved,
)

_SETTLED = 2  # attempts by a new scaler that make sure it took the old one's place
_KEPT = 64  # scalers remembered


@dataclass(slots=True)
class _Life:
    made: ScalerMade | None = None
    scale: float | None = None
    attempts: dict[int, int] = field(default_factory=dict)  # optimizer -> attempts through this scaler
    loaded: bool = False
    given: bool = False
    last: int = 0  # number of the last event that used it
    skipped: int = 0


class ScalerReplaced(BaseCheck):
    """A new scaler in the place of one that had found its scale; a resumed run whose scaler starts afresh."""

    rules = ("scaler-recreated", "scaler-not-restored")

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}
        self._loaded: dict[int, StateLoaded] = {}  # optimizer -> state loaded into it, not yet stepped since
        self._modules = 0
        self._files: set[str] = set()
        self._numbers: set[float] = set()
        self._told: set[int] = set()
        self._saved = False

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case ScalerMade(enabled=True):
                self._lives[event.scaler] = _Life(made=event, scale=event.scale, last=event.seq)
                if len(self._lives) > _KEPT:
                    del self._lives[next(iter(self._lives))]
            case StateLoaded(kind="scaler", ident=int(ident)):
                self._life(ident).loaded = True
            case StateLoaded(kind="optimizer", ident=int(ident)):
                if event.states or "file with optimizer" in self._files:  # else the state of one that never ran
                    self._loaded[ident] = event
            case StateLoaded(kind="module"):
                self._modules += 1
            case StateSaved():
                self._saved = True
            case StateLoaded():
                self._files.add(event.kind)
                self._numbers.update(event.numbers)
            case ScaleUpdated():
                life = self._life(event.scaler)
                life.scale, life.given = event.after, life.given or event.given
            case _:
                pass
        return ()

    def _others(self, life: _Life) -> Iterable[_Life]:
        return (other for other in self._lives.values() if other is not life)

    def _life(self, ident: int) -> _Life:
        return self._lives.setdefault(ident, _Life())

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        attempt = update.attempt
        if attempt.scaler is None:
            self._loaded.pop(update.optimizer, None)
            return
        life = self._life(attempt.scaler)
        before = life.attempts.get(update.optimizer, 0)
        life.attempts[update.optimizer] = before + 1
        life.last = attempt.seq
        life.skipped += attempt.outcome == "skipped"
        loaded = self._loaded.pop(update.optimizer, None)
        if loaded is not None and not before:
            yield from self._not_restored(loaded, life, attempt)
        if life.attempts[update.optimizer] == _SETTLED:
            yield from self._recreated(attempt.scaler, update.optimizer, life)

    def end(self, story: Story) -> Iterable[Finding]:
        for ident, life in self._lives.items():
            for optimizer, count in life.attempts.items():
                if count < _SETTLED:
                    yield from self._recreated(ident, optimizer, life)

    def _recreated(self, ident: int, optimizer: int, life: _Life) -> Iterable[Finding]:
        made = life.made
        if made is None or life.loaded or life.given or ident in self._told:
            return
        older = [
            old
            for number, old in self._lives.items()
            if number != ident and old.attempts.get(optimizer) and old.made is not None and old.last < made.seq
        ]
        if not older:
            return
        old = max(older, key=lambda o: o.last)
        assert old.made is not None
        carried_over = old.scale == made.scale and made.scale != old.made.scale
        if carried_over or (old.scale is not None and made.scale in self._numbers):
            return
        self._told.add(ident)
        lost = old.scale is not None and old.scale != made.scale
        yield Finding(
            rule="scaler-recreated",
            severity="error" if lost else "warning",
            at=made.at,
            message=(
                f"a new scaler (scale {made.scale:g}) replaced the one this optimizer was stepped with, which had "
                f"reached {old.scale or 0:g} after {sum(old.attempts.values())} attempts"
                + ("" if lost else ": its count of good updates, after which the scale grows, starts at zero again")
            ),
            evidence={
                "scale_before": old.scale,
                "scale_after": made.scale,
                "attempts_before": sum(old.attempts.values()),
                "skipped_before": old.skipped,
            },
            fix="make the GradScaler once, before the loop",
        )

    def _not_restored(self, loaded: StateLoaded, life: _Life, attempt: Attempt) -> Iterable[Finding]:
        made = life.made
        if made is None or life.loaded or life.given or sum(life.attempts.values()) > 1 or not self._modules:
            return
        if made.scale in self._numbers:
            return  # restored by hand
        there = "file with scaler" in self._files
        if (
            not there
            and self._saved
            and not any(other.last < loaded.seq and other.attempts for other in self._others(life))
        ):
            return  # what was saved here was not trained with a scaler: the run changes its precision
        yield Finding(
            rule="scaler-not-restored",
            severity="error",
            at=loaded.at,
            message=(
                f"model and optimizer were restored, the loss scale was not: this scaler starts at {made.scale:g}"
                + ("; the checkpoint holds the scaler's state" if there else "")
            ),
            evidence={"scale": made.scale, "states": loaded.states, "in_checkpoint": there},
            fix='scaler.load_state_dict(checkpoint["scaler"])  # and save scaler.state_dict() with the rest',
        )
