"""Autocast regions: which are open, which dtype the last forward ran in."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import AutocastEntered, AutocastLeft
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session

HALF = (torch.float16, torch.bfloat16)


class Autocasts:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._regions = itertools.count(1)
        self._open = threading.local()
        self._last: str | None = None

    def install(self, patches: Patches) -> None:
        region = torch.amp.autocast_mode.autocast
        patches.around(region, "__enter__", None, self._after_enter)
        patches.around(region, "__exit__", None, self._after_exit)

    def last_half(self) -> str | None:
        """Half dtype of the last region that was entered (and on), forgotten once another contribution asked for it."""
        stack: list[tuple[int, int, str | None]] = getattr(self._open, "stack", [])
        return next((half for _, _, half in reversed(stack) if half), self._last)

    def inside(self, device: str) -> bool:
        """Whether this thread is inside an autocast region of this device type that is on."""
        return torch.is_autocast_enabled(device)

    def _after_enter(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        region = args[0]
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        ident = next(self._regions)
        half = name_of(region.fast_dtype) if region._enabled and region.fast_dtype in HALF else None
        self._open.stack.append((id(region), ident, half))
        if region._enabled or len(self._open.stack) == 1:
            self._last = half
        self._session.stream.emit(
            AutocastEntered,
            at=self._session.place(),
            region=ident,
            device=region.device,
            dtype=name_of(region.fast_dtype),
            enabled=bool(region._enabled),
            depth=len(self._open.stack),
            thread=threading.get_ident(),
        )

    def _after_exit(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack = getattr(self._open, "stack", [])
        for place in range(len(stack) - 1, -1, -1):
            if stack[place][0] == id(args[0]):
                self._session.stream.emit(AutocastLeft, region=stack.pop(place)[1])
                return


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
