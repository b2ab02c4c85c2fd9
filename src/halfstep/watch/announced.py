"""What halfstep's own engine tells of its work: scales, divisors, updates it skips. See `halfstep.events.audience`.

An update of the engine becomes the same events as one by a GradScaler and a fused optimizer, so that every check
judges it as it judges those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Attempt, GradientsCleared, ScalerMade, ScaleUpdated, StateLoaded
from halfstep.events.audience import LISTENERS
from halfstep.watch.gradients import Gradients, Mark
from halfstep.watch.halves import Halves
from halfstep.watch.patches import Patches
from halfstep.watch.scalers import Announcement, Scalers, counts, rate
from halfstep.watch.schedulers import Schedulers
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

Optimizer = torch.optim.Optimizer


class Announced:
    """``attempts``: called with each optimizer before the engine touches its gradients; ``skipped``: with each that it
    then passed over, and which no hook of torch's tells of."""

    def __init__(
        self, session: Session, gradients: Gradients, scalers: Scalers, halves: Halves, schedulers: Schedulers
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._scalers = scalers
        self._halves = halves
        self._schedulers = schedulers
        self._counts: dict[int, dict[str, int]] = {}
        self._made: set[int] = set()
        self.attempts: list[Callable[[Optimizer], None]] = []
        self.skipped: list[Callable[[Optimizer], None]] = []

    def install(self, patches: Patches) -> None:
        LISTENERS.append(self)

    def remove(self) -> None:
        if self in LISTENERS:
            LISTENERS.remove(self)

    def _observe(self, observer: Callable[..., None], *args: Any) -> None:
        if self._session.patches.live:
            self._session.patches.observe(f"the engine, {observer.__name__.strip('_')}", observer, *args)

    # -- contributions -------------------------------------------------------------------------------------------

    def contributing(self, scaler: Any, *, undivided: bool) -> None:
        self._observe(self._contributing, scaler, undivided)

    def _contributing(self, scaler: Any, undivided: bool) -> None:
        scale = None if scaler is None else self._scalers.scale_now(scaler)
        mark = None
        if scale is not None:
            self._know(scaler)
            mark = Mark(self._session.ident("scaler", scaler), scale)
        self._scalers.announced = Announcement(mark, undivided)

    def contributed(self) -> None:
        self._scalers.announced = None

    def _know(self, scaler: Any) -> None:
        """The engine switches its scaler on once it knows the device: tell it as made then, where it was made, and
        as loaded if it was."""
        ident, scale = self._session.ident("scaler", scaler), self._scalers.scale_now(scaler)
        if ident in self._made or scale is None:
            return
        self._made.add(ident)
        self._session.stream.emit(
            ScalerMade,
            at=self._scalers.off.get(ident) or self._session.place(),
            scaler=ident,
            scale=Late(scale),
            enabled=True,
            device=scaler._device,
            growth_factor=float(scaler._growth_factor),
            backoff_factor=float(scaler._backoff_factor),
            growth_interval=int(scaler._growth_interval),
        )
        if ident in self._scalers.loaded:
            self._session.stream.emit(StateLoaded, at=self._scalers.loaded[ident], kind="scaler", ident=ident)

    # -- updates -------------------------------------------------------------------------------------------------

    def attempting(self, optimizers: Sequence[Any]) -> None:
        self._observe(self._attempting, optimizers)

    def _attempting(self, optimizers: Sequence[Optimizer]) -> None:
        self._gradients.reconcile()
        for optimizer in optimizers:
            self._halves.about_to_update(optimizer)
            self._counts[self._session.ledger.ident(optimizer)] = counts(optimizer)
            for about_to in self.attempts:
                about_to(optimizer)
        self._scalers.enter()

    def refused(self, optimizers: Sequence[Any]) -> None:
        self._observe(self._refused)

    def _refused(self) -> None:
        self._scalers.leave()
        self._gradients.settle()

    def attempted(
        self, optimizers: Sequence[Any], *, scaler: Any, divisor: Any, empty: Any, moved: bool, schedule: str
    ) -> None:
        self._schedulers.declared = schedule == "attempted"
        self._observe(self._attempted, optimizers, scaler, divisor, empty, moved)

    def _attempted(self, optimizers: Sequence[Optimizer], scaler: Any, divisor: Any, empty: Any, moved: bool) -> None:
        self._scalers.leave()
        changes = self._gradients.settle()
        stream, at = self._session.stream, self._session.place()
        made = {draft.fields["optimizer"] for draft in self._scalers.attempts}
        fields: dict[str, Any] = {"at": at, "managed": True, "divided_by": None}  # what it clips by is no part of it
        if isinstance(divisor, torch.Tensor):
            fields["divided_by"] = Late(divisor.clone())
        elif divisor != 1.0:
            fields["divided_by"] = float(divisor)
        if scaler is not None:
            fields.update(via="scaler", scaler=self._session.ident("scaler", scaler))
        for draft in self._scalers.attempts:  # by itself it may still skip, and says so; one may step another inside
            draft.fields.update(fields)
        cleared = {}
        for optimizer in optimizers:
            ident = self._session.ledger.ident(optimizer)
            known = self._counts.pop(ident, None) or counts(optimizer)
            cleared[ident] = known["gradients"]
            if ident not in made:
                nothing = not isinstance(empty, torch.Tensor) and empty != 0.0
                outcome = "empty" if nothing else "skipped"
                told = {**fields, **known, "outcome": outcome, "lr": rate(optimizer)}
                for passed_over in self.skipped:
                    passed_over(optimizer)
                stream.emit(Attempt, optimizer=ident, **told)
            self._gradients.attempted(optimizer)
        for ident, change in changes.items():  # they own some of the same parameters
            if change.cleared:
                cleared.setdefault(ident, change.cleared)
        stream.emit(GradientsCleared, at=at, optimizers=cleared, how="manager.step", had=sum(cleared.values()))
        if scaler is not None and moved:
            self._updated(scaler, given=False)

    def settled(self) -> None:
        self._schedulers.declared = False
        if self._session.patches.live:
            self._session.applied(None)

    def scale_set(self, scaler: Any) -> None:
        self._observe(self._set, scaler)

    def _set(self, scaler: Any) -> None:
        self._know(scaler)
        self._updated(scaler, given=True)

    def _updated(self, scaler: Any, *, given: bool) -> None:
        before, after = self._scalers.moved(scaler)
        self._session.stream.emit(
            ScaleUpdated,
            at=self._session.place(),
            scaler=self._session.ident("scaler", scaler),
            before=None if before is None else Late(before),
            after=None if after is None else Late(after),
            given=given,
        )
