"""Something went wrong in a micro-batch that nobody looked at: its calls are made again, under a look of their own.

A non-finite loss is known at its backward, a skipped update after its attempt; on an accelerator both are asked for
without waiting, one update late. If the replay does not show the culprit, the next updates are looked at as they come.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from halfstep.events import Event, Place
from halfstep.watch.calls import Call, Calls
from halfstep.watch.culprit import Culprit
from halfstep.watch.gradients import Gradients
from halfstep.watch.look import Look
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users
from halfstep.watch.poison import Poison
from halfstep.watch.replay import replay
from halfstep.watch.stream import has_value, on_host

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_REPLAYS = 32  # of a run; then only the next updates are looked at
_PENDING = 64


class Trouble:
    def __init__(self, session: Session, gradients: Gradients, calls: Calls, culprit: Culprit, poison: Poison) -> None:
        self._session = session
        self._gradients = gradients
        self._calls = calls
        self._culprit = culprit
        self._poison = poison
        self._pending: list[tuple[torch.Tensor, Any, Callable[[float], bool]]] = []
        self._replays = 0
        self._again: _Again | None = None
        self._scale: torch.Tensor | None = None  # carried by the gradients of the last attempt

    def install(self, patches: Patches) -> None:
        patches.around(torch.autograd, "backward", None, self._after_backward)
        patches.around(torch.amp.GradScaler, "step", self._before_step, self._after_step)

    def remove(self) -> None:
        self._pending.clear()

    # -- what is asked -------------------------------------------------------------------------------------------

    def _after_backward(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        roots = kwargs.get("tensors", args[0] if args else ())
        root = roots if isinstance(roots, torch.Tensor) else next(iter(roots), None)
        if isinstance(root, torch.Tensor) and root.numel() == 1 and not self._session.look.is_open:
            self._ask(root, lambda value: not math.isfinite(value))

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        mark = next(iter(self._gradients.carried.values()), None)
        self._scale = None if mark is None else mark.scale
        return self._session.look.is_open

    def _after_step(self, looked: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler = args[0]
        optimizer = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        if looked or not scaler._enabled or optimizer is None:
            return  # who was looked at is known already
        for found in (scaler._per_optimizer_states[id(optimizer)].get("found_inf_per_device") or {}).values():
            self._ask(found, bool)

    def _ask(self, value: torch.Tensor, wrong: Callable[[float], bool]) -> None:
        if not has_value(value):
            return
        if value.is_cpu:
            if wrong(on_host(value)):
                self._happened()
            return
        self._poll()
        copy = value.detach().float().reshape(()).to("cpu", non_blocking=True)
        event = torch.Event(value.device)
        event.record()
        self._pending.append((copy, event, wrong))
        del self._pending[:-_PENDING]

    def _poll(self) -> None:
        """What has arrived from the device by now."""
        while self._pending and self._pending[0][1].query():
            copy, _, wrong = self._pending.pop(0)
            if wrong(on_host(copy)):
                self._happened()

    # -- what is done --------------------------------------------------------------------------------------------

    def _happened(self) -> None:
        self._poison.suspect()
        calls = list(self._calls.recent())
        if any(call.explained for call in calls):
            return
        for call in calls:
            if self._replays >= _REPLAYS:
                break
            self._replays += 1
            if self._look_into(call):
                call.explained = True
                return
        self._calls.arm()
        self._session.look.want()

    def _look_into(self, call: Call) -> bool:
        if self._again is None:
            self._again = _Again(self._session, self._gradients, self._culprit)
        look = self._session.look
        opened = look.is_open  # for the update that comes: only one look can be open
        look.close()
        try:
            return self._again.inspect(call, self._scale)
        finally:
            if opened:
                look.open()


class _Stream:
    """Takes the replay's events into the run's stream, as of the micro-batch that is replayed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.micro = 0
        self.told = 0

    def emit(self, kind: type[Event], /, *, at: Place | None = None, **fields: Any) -> Any:
        self.told += 1
        return self._session.stream.emit(kind, at=at, micro=self.micro, **fields)


class _Again:
    """A session's stand-in during a replay: a look of its own, places within the replayed call."""

    def __init__(self, session: Session, gradients: Gradients, culprit: Culprit) -> None:
        self._session = session
        self.stream = _Stream(session)
        self.look = Look(cast(Any, self))
        self.culprit = Culprit(cast(Any, self), gradients, only_culprits=True)
        self.culprit.paths.adopt(culprit.paths)
        self.culprit.install(session.patches)
        self._call: Call | None = None
        self._base: FrameType | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)  # in everything else the run's own

    def inspect(self, call: Call, scale: torch.Tensor | None) -> bool:
        """Replay the call; whether a culprit was found."""
        self._call, self._base = call, sys._getframe()
        self.stream.micro, self.stream.told = call.micro + 1, 0
        number = 1.0 if scale is None else float(scale)
        try:
            seen = replay(self._session, call, look=self.look, scale=number)
            if seen is not None:
                self.culprit.trace(seen.outputs, seen.gradients.values(), scale)
        finally:
            self.culprit.forget()
            self._base = None
        return self.stream.told > 0

    def place(self) -> Place | None:
        """The user's line inside the replayed call; its own line where torch's modules run."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._base:
            if is_users(frame.f_code):
                return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
            frame = frame.f_back
        return self._call.at if self._call is not None else None
