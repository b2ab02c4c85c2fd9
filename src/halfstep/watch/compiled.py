"""What is compiled: looks end there, for compiled code does not show its operators one by one."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


class Compiled:
    """Forbids looks from the first ``torch.compile`` on, or from the start where something is compiled already."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def install(self, patches: Patches) -> None:
        patches.around(torch, "compile", self._before)  # `module.compile()` and decorators come by here too
        if compiled_already():
            self._session.look.forbid("something was compiled before the watch began")

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not kwargs.get("disable") and not any(os.environ.get(name) == "1" for name in _OFF):
            self._session.look.forbid("the script compiles")


def compiled_already() -> bool:
    """Whether some callable in this process was compiled. Does not import what torch has not."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", None) or {}
    return any(backend is not None for backend in backends.values())
