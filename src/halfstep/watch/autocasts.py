"""Autocast regions: which are open in which thread, what the last forward ran in, which switched themselves off."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import AutocastEntered, AutocastLeft, Place, SwitchedOff
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users

if TYPE_CHECKING:
    from halfstep.watch.session import Session

HALF = (torch.float16, torch.bfloat16)
_TOLD = 4  # times that one line's region is told to have switched itself off


class Region:
    """An open autocast region. ``half``: the dtype it computes in, None where it is off or not in half precision."""

    __slots__ = ("at", "device", "enabled", "half", "ident", "key")

    def __init__(self, context: Any, ident: int, at: Place | None) -> None:
        self.key = id(context)
        self.ident = ident
        self.at = at
        self.device = str(context.device)
        self.enabled = bool(context._enabled)
        self.half = name_of(context.fast_dtype) if self.enabled and context.fast_dtype in HALF else None


class Autocasts:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._regions = itertools.count(1)
        self._open = threading.local()
        self._last: str | None = None
        self._made: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()
        self._threads: dict[int, list[Region]] = {}
        self.listeners: list[Callable[[Region], None]] = []  # told of every region entered
        self._told: dict[Place | None, int] = {}

    def install(self, patches: Patches) -> None:
        region = torch.amp.autocast_mode.autocast
        patches.around(region, "__init__", None, self._after_init)
        patches.around(region, "__enter__", None, self._after_enter)
        patches.around(region, "__exit__", None, self._after_exit)
        patches.around(torch.amp.GradScaler, "__init__", None, self._after_scaler)

    @property
    def stack(self) -> list[Region]:
        """This thread's open regions, the outermost first."""
        stack: list[Region] | None = getattr(self._open, "stack", None)
        if stack is None:
            stack = self._open.stack = self._threads[threading.get_ident()] = []
        return stack

    def elsewhere(self, device: str) -> tuple[int, Region] | None:
        """A region for this device that is on in another thread, with that thread's number."""
        here = threading.get_ident()
        for thread, stack in list(self._threads.items()):
            if thread != here and stack and stack[-1].half is not None and stack[-1].device == device:
                return thread, stack[-1]
        return None

    def last_half(self) -> str | None:
        """Half dtype of the innermost region of this thread that is on, else of the last one that was entered."""
        return next((region.half for region in reversed(self.stack) if region.half), self._last)

    def state(self, device: str) -> str:
        """The half dtype this thread's autocast computes in on a device, "off" without one; inside operators too.

        (There torch's own flag tells whether autocast is still to come, which it never is.)
        """
        for region in reversed(self.stack):
            if region.device == device:
                return region.half or "off"
        on = self.inside(device) and torch.get_autocast_dtype(device) in HALF
        return name_of(torch.get_autocast_dtype(device)) if on else "off"

    def inside(self, device: str) -> bool:
        """Whether this thread is inside an autocast region of this device type that is on."""
        return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)

    def _after_init(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        region = args[0]
        asked = kwargs.get("enabled", args[3] if len(args) > 3 else True)
        self._made[region] = self._session.place()
        if asked and not region._enabled and region.fast_dtype in HALF:
            self._switched_off("autocast", str(region.device), name_of(region.fast_dtype))

    def _after_scaler(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("enabled", args[6] if len(args) > 6 else True)
        if asked and not args[0]._enabled:
            self._switched_off("scaler", str(getattr(args[0], "_device", "cuda")), "")

    def _switched_off(self, what: str, device: str, dtype: str) -> None:
        at = self._session.place()
        self._told[at] = self._told.get(at, 0) + 1
        if self._told[at] <= _TOLD:
            self._session.stream.emit(SwitchedOff, at=at, what=what, device=device, dtype=dtype)

    def _after_enter(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context, stack = args[0], self.stack
        made = self._made.get(context)
        region = Region(context, next(self._regions), _decorated(sys._getframe(1)) or self._session.place())
        stack.append(region)
        for listener in self.listeners:
            listener(region)
        if region.enabled or len(stack) == 1:
            self._last = region.half
        self._session.stream.emit(
            AutocastEntered,
            at=region.at,
            region=region.ident,
            device=region.device,
            dtype=name_of(context.fast_dtype),
            enabled=region.enabled,
            depth=len(stack),
            thread=threading.get_ident(),
            made_at=made if made != region.at else None,
        )

    def _after_exit(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack = self.stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place].key == id(args[0]):
                raised = len(args) > 1 and args[1] is not None
                self._session.stream.emit(AutocastLeft, region=stack.pop(place).ident, raised=raised)
                return


def _decorated(frame: FrameType | None) -> Place | None:
    """Where the function stands that a region was put on as a decorator; None for a region of another kind."""
    for _ in range(4):
        if frame is None:
            return None
        if frame.f_code.co_name == "decorate_autocast":
            function = frame.f_locals.get("func")
            code = getattr(function, "__code__", None)
            if code is None or not is_users(code):
                return None
            return Place(code.co_filename, code.co_firstlineno, code.co_qualname)
        frame = frame.f_back
    return None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
