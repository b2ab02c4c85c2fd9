"""Which module is running: a stack of their names, kept only while operators are looked at."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from halfstep.events import Place
from halfstep.watch.patches import Patches, not_now
from halfstep.watch.place import is_users

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_DEPTH = 3  # how deep tensors are looked for in lists and dictionaries of arguments


class Entry(Protocol):
    def enter(
        self, module: torch.nn.Module, at: Place | None, arguments: Iterator[tuple[str, torch.Tensor]]
    ) -> None: ...


class Paths:
    """`path` names the innermost module now running: "net.blocks.0.mlp", by the variable that holds its root."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._running = threading.local()
        self._handles: list[Any] = []
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self.entries: list[Entry] = []
        self.root_at: Place | None = None  # where the root module that runs was called

    def install(self, patches: Patches) -> None:
        self._session.look.watchers.append(self._turned)

    def adopt(self, other: Paths) -> None:
        """Share the names that the other one has found."""
        self._names = other._names

    def told(self, model: torch.nn.Module, names: dict[int, str]) -> None:
        """Call the modules of this model so, by their id, whichever of them is called as a root."""
        for module in model.modules():
            self._names[module] = names

    def _turned(self, opened: bool) -> None:
        if opened and not self._handles:
            self._running = threading.local()
            self._handles = [
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after, always_call=True),
            ]
        elif not opened:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def remove(self) -> None:
        self._turned(False)

    # -- while looking -------------------------------------------------------------------------------------------

    def _stack(self) -> list[torch.nn.Module]:
        stack: list[torch.nn.Module] | None = getattr(self._running, "stack", None)
        if stack is None:
            stack = self._running.stack = []
        return stack

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        stack = self._stack()
        if not stack and not not_now() and self._session.look.alone:
            try:
                with self._session.look.silent(), torch.no_grad():  # checkpointing counts what its forward saves
                    self._entered(module, args, sys._getframe(1))
            except Exception as error:
                self._session.fault("root module entered", error)
        stack.append(module)

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        stack = self._stack()
        while stack and stack.pop() is not module:
            pass

    def _entered(self, module: torch.nn.Module, args: Any, frame: FrameType | None) -> None:
        if module not in self._names:
            root = variable(module, frame) or type(module).__name__
            self._names[module] = {id(m): f"{root}.{name}" if name else root for name, m in module.named_modules()}
        kwargs = frame.f_locals.get("kwargs") if frame is not None else None
        at = self.root_at = self._session.place()
        for entry in self.entries:
            entry.enter(module, at, arguments(args, kwargs if isinstance(kwargs, dict) else {}))

    # -- asking --------------------------------------------------------------------------------------------------

    def path(self) -> str | None:
        stack: list[torch.nn.Module] | None = getattr(self._running, "stack", None)
        if not stack:
            return None
        names = self._names.get(stack[0], {})
        for module in reversed(stack):
            name = names.get(id(module))
            if name is not None:
                return name
        return type(stack[-1]).__name__

    def root(self) -> torch.nn.Module | None:
        """The root module that runs now."""
        stack: list[torch.nn.Module] | None = getattr(self._running, "stack", None)
        return stack[0] if stack else None

    def name(self, root: torch.nn.Module) -> str:
        """What the script calls this root module, as far as it was seen."""
        return self._names.get(root, {}).get(id(root), type(root).__name__)

    def roots(self) -> list[torch.nn.Module]:
        return list(self._names)


def arguments(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among a call's arguments, with their position or name."""
    for index, value in enumerate(args):
        yield from _tensors(str(index), value, _DEPTH)
    for key, value in kwargs.items():
        yield from _tensors(key, value, _DEPTH)


def _tensors(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield name, value
    elif depth and isinstance(value, (list, tuple)):
        for index, inner in enumerate(value[:64]):
            yield from _tensors(f"{name}[{index}]", inner, depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, inner in list(value.items())[:64]:
            yield from _tensors(f"{name}[{key!r}]", inner, depth - 1)


def variable(thing: Any, frame: FrameType | None) -> str | None:
    """The name by which the script's nearest code holds this object: "net", "self.encoder"."""
    while frame is not None:
        if is_users(frame.f_code):
            known = frame.f_locals
            try:
                found = _name_in(known, thing) or _name_in(frame.f_globals, thing) or _attribute_in(known, thing)
            finally:
                if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
                    known.clear()  # a copy that the frame would keep, and all it holds with it
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _name_in(space: Mapping[str, Any], thing: Any) -> str | None:
    return next((name for name, value in list(space.items()) if value is thing and name != "self"), None)


def _attribute_in(space: Mapping[str, Any], thing: Any) -> str | None:
    for owner, held in list(space.items()):
        for name, value in _attributes(held):
            if value is thing:
                return name if owner == "self" else f"{owner}.{name}"
    return None


def _attributes(held: Any) -> list[tuple[str, Any]]:
    if isinstance(held, torch.nn.Module):
        return list(held._modules.items())
    if isinstance(held, dict):
        return [(str(k), v) for k, v in list(held.items())[:64]]
    return list(getattr(held, "__dict__", {}).items()) if type(held).__module__ != "builtins" else []
