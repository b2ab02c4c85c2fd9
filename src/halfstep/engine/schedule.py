"""Schedules move in their declared unit: applied updates, attempted updates, or the user's own calls."""

from __future__ import annotations

import bisect
import contextlib
import copy
import weakref
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.settings import choice
from halfstep.errors import MisuseError, PolicyError, counted

UNITS = ("applied", "attempted", "calls")


def schedulers_of(scheduler: Any) -> tuple[Any, ...]:
    """``scheduler`` as given to step -> the schedulers. One that wants a metric is refused."""
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)
    for one in schedulers:
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise MisuseError(
                "ReduceLROnPlateau was given to manager.step: it moves on a validation metric, not on updates",
                "call scheduler.step(metric) yourself after validation, and step(model, optimizer) without it",
            )
        if isinstance(one, (torch.amp.GradScaler, torch.optim.Optimizer)):
            kind = type(one).__name__
            scaler = isinstance(one, torch.amp.GradScaler)
            raise PolicyError(
                f"{kind} was given to manager.step as a scheduler",
                "leave it out: the manager scales the loss itself" if scaler
                else "step(model, [optimizer, another]) for several that share this backward",
            )  # fmt: skip
        if not callable(getattr(one, "step", None)):
            raise PolicyError(f"{type(one).__name__} is no scheduler: it has no step()", "a torch.optim.lr_scheduler")
    return schedulers


class Schedule:
    """Moves the schedulers given to ``step``, and notices when somebody else does.

    On an accelerator the outcome of an update is not known yet when the schedule should move. It then moves at once,
    and ``take_back`` undoes it where the update turns out to have been skipped: before the next update, or before a
    save.
    """

    def __init__(self, unit: str) -> None:
        self.unit = choice("scheduler_unit", unit, UNITS)
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._kept: list[tuple[Any, list[tuple[Any, dict[str, Any]]], list[dict[str, Any]]]] = []

    def require_fit(self, schedulers: tuple[Any, ...], optimizers: tuple[Any, ...]) -> None:
        """Raise where a scheduler is another optimizer's, was moved by somebody else, or is at its end."""
        for scheduler in schedulers:
            _require_own(scheduler, optimizers)
        if self.unit != "calls":
            self.require_untouched(schedulers, optimizers)
            for scheduler in schedulers:
                _require_room(scheduler, self.unit)

    def require_untouched(self, schedulers: tuple[Any, ...], optimizers: tuple[Any, ...]) -> None:
        """Raise where a scheduler moved since the manager last moved it.

        One that is seen for the first time may have been loaded. Not so where its optimizer has never been stepped and
        holds no state although it keeps some: then it was moved before the first update.
        """
        for scheduler in schedulers:
            count = _position(scheduler)
            known = self._known(scheduler)
            if known is None and count is not None and all(_is_untouched(optimizer) for optimizer in optimizers):
                known = 1 if hasattr(scheduler, "_step_count") else count
            if count is not None and known is not None and count > known:
                raise MisuseError(
                    f"{type(scheduler).__name__}.step() was called by hand {counted(count - known, 'time')} since the "
                    f"last update, yet it is given to manager.step, which moves it by {self.unit} updates",
                    "leave one of them out: do not call scheduler.step(), or do not pass the scheduler to step; "
                    'scheduler_unit="calls" leaves it to you',
                )

    def _known(self, scheduler: Any) -> int | None:
        try:
            return self._seen.get(scheduler)
        except TypeError:  # it takes no weak reference: nothing is known of it
            return None

    def move(self, schedulers: tuple[Any, ...], optimizers: tuple[Any, ...], outcome: str, update: int) -> None:
        """Move after the attempt numbered ``update``, whose outcome is known.

        A scheduler that raises does not stop the others, and its position is known like theirs: the update is done.
        """
        failed: tuple[Any, Exception] | None = None
        if self.unit == "calls":
            return
        for scheduler in schedulers:
            if outcome == "applied" or self.unit == "attempted":
                for optimizer in optimizers:
                    # torch warns of a wrong order when the first attempt was skipped; the order is right here.
                    optimizer._opt_called = True
                try:
                    scheduler.step()
                except Exception as error:
                    failed = failed or (scheduler, error)
            self._note(scheduler)
        if failed is not None:
            scheduler, why = failed
            raise MisuseError(
                f"update {update} was {outcome}, then {type(scheduler).__name__}.step() raised "
                f"{type(why).__name__}: {why}",
                "the update is complete, and the loop may go on with manager.backward; mend the scheduler, or leave it "
                "out of manager.step",
            ) from why

    def move_at_once(self, schedulers: tuple[Any, ...], optimizers: tuple[Any, ...], update: int) -> None:
        """Move before the outcome is known, keeping the way back."""
        if self.unit == "calls":
            return
        if self.unit == "applied":
            self._kept = [(s, _snapshot(s), _hyper(_optimizer_of(s))) for s in schedulers]
        self.move(schedulers, optimizers, "applied", update)

    def take_back(self, outcome: str) -> None:
        """The outcome of the update that ``move_at_once`` went ahead of."""
        kept, self._kept = self._kept, []
        if outcome == "applied":
            return
        for scheduler, states, groups in kept:
            for one, state in states:
                vars(one).clear()
                vars(one).update(state)
            optimizer = _optimizer_of(scheduler)
            for group, values in zip(optimizer.param_groups if optimizer else (), groups, strict=True):
                for key, value in values.items():
                    if isinstance(group.get(key), Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value
            self._note(scheduler)

    def forget(self) -> None:
        """After states were loaded: positions start anew."""
        self._seen.clear()

    def _note(self, scheduler: Any) -> None:
        count = _position(scheduler)
        if count is not None:
            with contextlib.suppress(TypeError):
                self._seen[scheduler] = count


def _require_own(scheduler: Any, optimizers: tuple[Any, ...]) -> None:
    """Raise where a scheduler writes into parameter groups that none of these optimizers reads."""
    of = _optimizer_of(scheduler)
    if of is None or any(of is optimizer for optimizer in optimizers):
        return
    own = {id(group) for optimizer in optimizers for group in optimizer.param_groups}  # a wrapper shares its groups
    if own.isdisjoint(map(id, getattr(of, "param_groups", ()))):
        kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise MisuseError(
            f"{type(scheduler).__name__} schedules another optimizer ({type(of).__name__}) than the {kinds} given to "
            "manager.step: no learning rate would change here",
            "build the scheduler from the optimizer that is stepped; where an optimizer was made anew, its schedulers "
            "too",
        )


def _require_room(scheduler: Any, unit: str) -> None:
    """Raise where the next move of a schedule of a fixed length would be one too many."""
    inner = getattr(scheduler, "_schedulers", None)
    position = getattr(scheduler, "last_epoch", None)
    if isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        assert inner is not None
        now = bisect.bisect_right(scheduler._milestones, scheduler.last_epoch + 1)
        begins = now > 0 and scheduler._milestones[now - 1] == scheduler.last_epoch + 1
        inner, position = ([] if begins else [inner[now]]), None
    for one in inner or ():
        _require_room(one, unit)
    total = getattr(scheduler, "total_steps", None)
    if isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR) and position is not None and position + 1 > total:
        raise MisuseError(
            f"{type(scheduler).__name__} has come to its end: it was made for total_steps={total}, and this update "
            f"would be move {position + 1}",
            f"total_steps is the number of {unit} updates of the whole run (groups an epoch × epochs); past the end, "
            "leave the scheduler out of manager.step: the learning rate stays where it is",
        )


def _is_untouched(optimizer: Any) -> bool:
    """Whether an optimizer that keeps state was never stepped nor loaded."""
    stateless = all(group.get("momentum") == 0 for group in optimizer.param_groups)
    known = type(optimizer).__module__.startswith("torch.optim")
    return known and not stateless and not optimizer.state and not getattr(optimizer, "_opt_called", False)


def _position(scheduler: Any) -> int | None:
    count = getattr(scheduler, "_step_count", None)
    if not isinstance(count, int):
        count = getattr(scheduler, "last_epoch", None)
    return count if isinstance(count, int) else None


def _optimizer_of(scheduler: Any) -> Any:
    return getattr(scheduler, "optimizer", None)


def _snapshot(scheduler: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The attributes of a scheduler and of those inside it; what changes in place is copied, the rest is shared."""
    kept = [(scheduler, {key: _copy(value) for key, value in vars(scheduler).items()})]
    for inner in getattr(scheduler, "_schedulers", ()):
        kept.extend(_snapshot(inner))
    return kept


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return copy.copy(value) if isinstance(value, dict) else value


def _hyper(optimizer: Any) -> list[dict[str, Any]]:
    """What schedulers write into parameter groups: learning rates, momenta, betas."""
    if optimizer is None:
        return []
    return [
        {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
