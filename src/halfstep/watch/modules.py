"""Root modules: those called by no other module. Their mode and examples; inner calls cost one comparison."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import ModuleCalled
from halfstep.launch import hide
from halfstep.watch.autocasts import Autocasts
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session


class Modules:
    def __init__(self, session: Session, autocasts: Autocasts) -> None:
        self._session = session
        self._autocasts = autocasts
        self._local = threading.local()
        self.roots: dict[int, torch.nn.Module] = {}

    def install(self, patches: Patches) -> None:
        original = torch.nn.Module.__call__
        local = self._local

        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not patches.live or getattr(local, "inside", False):
                return original(module, *args, **kwargs)
            local.inside = True
            try:
                with self._session.look.silent():
                    self._called(module, args, kwargs)
            except Exception as error:
                self._session.fault("module call", error)
            try:
                return original(module, *args, **kwargs)
            finally:
                local.inside = False

        hide(call)
        patches.replace(torch.nn.Module, "__call__", call)

    def _called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        self._session.stream.emit(
            ModuleCalled,
            at=self._session.place(),
            module=self._session.ident("module", module),
            type=type(module).__name__,
            training=module.training,
            grad_enabled=torch.is_grad_enabled(),
            autocast=self._autocasts.last_half() if self._autocasts.inside(_device(first)) else None,
            examples=int(first.shape[0]) if first is not None and first.ndim else None,
            thread=threading.get_ident(),
        )


def _device(tensor: torch.Tensor | None) -> str:
    return "cpu" if tensor is None else tensor.device.type
