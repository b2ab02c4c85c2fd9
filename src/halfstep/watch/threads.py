"""Forwards in threads that did not inherit autocast: its state belongs to the thread that entered the region."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import AutocastLost, Place
from halfstep.watch.autocasts import Autocasts
from halfstep.watch.modules import Modules
from halfstep.watch.patches import Patches
from halfstep.watch.place import place

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_TOLD = 16  # for each line


class Threads:
    def __init__(self, session: Session, autocasts: Autocasts, modules: Modules) -> None:
        self._session = session
        self._autocasts = autocasts
        self._modules = modules
        self._told: Counter[Place | None] = Counter()

    def install(self, patches: Patches) -> None:
        if self._called not in self._modules.entries:
            self._modules.entries.append(self._called)

    def _called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], at: Place | None) -> None:
        """A root module is about to run."""
        if self._autocasts.stack or not torch.is_grad_enabled() or threading.active_count() == 1:
            return
        first = next((p for p in module.parameters() if p.requires_grad), None)
        if first is None or self._autocasts.inside(first.device.type):
            return
        other = self._autocasts.elsewhere(first.device.type)
        if other is None:
            return
        thread, region = other
        if at is None:  # a library's thread calls the module itself: the user's line is where the other one waits
            frame = sys._current_frames().get(thread)
            at = None if frame is None else place(frame)
        self._told[at] += 1
        if self._told[at] <= _TOLD:
            self._session.stream.emit(
                AutocastLost,
                at=at,
                type=type(module).__name__,
                dtype=region.half,
                thread=threading.get_ident(),
                entered_at=region.at,
                optimizers=self._modules.owners(module),
            )
