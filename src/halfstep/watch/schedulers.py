"""Learning-rate schedules: made, advanced, how long they mean to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from halfstep.events import SchedulerMade, SchedulerStepped, StateLoaded
from halfstep.watch.lengths import length, overrun
from halfstep.watch.patches import Patches
from halfstep.watch.perthread import PerThread
from halfstep.watch.place import made_at
from halfstep.watch.scalers import rate

if TYPE_CHECKING:
    from halfstep.watch.session import Session


def _kinds(base: type[Any]) -> set[type[Any]]:
    return {k for sub in base.__subclasses__() for k in {sub, *_kinds(sub)}}


class Schedulers:
    def __init__(self, session: Session) -> None:
        self._session = session
        self.declared = False  # whoever moves schedules now was told to count attempts

    _depth = PerThread(int)
    _making = PerThread(int)

    def install(self, patches: Patches) -> None:
        base = lr_scheduler.LRScheduler
        for kind in {base, *_kinds(base)}:
            if "step" in vars(kind):
                patches.around(kind, "step", self._before_step, self._after_step, self._failed_step)
            if "__init__" in vars(kind):
                patches.around(kind, "__init__", self._before_init, self._after_init, self._failed_init)
        patches.around(base, "load_state_dict", None, self._after_load)

    def _before_init(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._making += 1

    def _failed_init(self, token: Any, error: BaseException) -> None:
        self._making -= 1

    def _after_init(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._making -= 1
        if self._making:
            return
        scheduler = args[0]
        optimizer = getattr(scheduler, "optimizer", None)
        self._session.stream.emit(
            SchedulerMade,
            at=made_at(scheduler),
            scheduler=self._session.ident("scheduler", scheduler),
            optimizer=self._session.ledger.ident(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None,
            type=type(scheduler).__name__,
            length=length(scheduler),
            overrun=overrun(scheduler),
            per_metric=isinstance(scheduler, lr_scheduler.ReduceLROnPlateau),
        )

    def _after_load(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ident = self._session.ident("scheduler", args[0])
        self._session.stream.emit(StateLoaded, at=self._session.place(), kind="scheduler", ident=ident)

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        optimizer = getattr(args[0], "optimizer", None)
        return rate(optimizer) if self._depth == 1 and optimizer is not None else None

    def _failed_step(self, token: Any, error: BaseException) -> None:
        self._depth -= 1

    def _after_step(self, before: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth or self._making:
            return
        scheduler = args[0]
        optimizer = getattr(scheduler, "optimizer", None)
        self._session.stream.emit(
            SchedulerStepped,
            at=self._session.place(),
            scheduler=self._session.ident("scheduler", scheduler),
            optimizer=self._session.ledger.ident(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None,
            position=getattr(scheduler, "last_epoch", None),
            metric=isinstance(scheduler, lr_scheduler.ReduceLROnPlateau),
            lr_before=before,
            lr_after=None if optimizer is None else rate(optimizer),
            given=kwargs.get("epoch", args[1] if len(args) > 1 else None) is not None or self.declared,
        )
