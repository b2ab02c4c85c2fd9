"""Replacing torch's functions while a session watches, and putting them back exactly.

Code that torch compiles goes past a wrapper: while it is traced, the original is called; where a compiled function has
called eager code, dynamo is kept from compiling the wrapper and what it observes with.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame as frames

from halfstep.launch import hide

Before = Callable[[tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]
Failed = Callable[[Any, BaseException], None]

_ABSENT = object()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_now() -> bool:
    """Whether what is called now is no call of the run's: a compiler traces it, a function transform maps it."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def uncompiled(function: _Function, inner: bool = True) -> _Function:
    """Let dynamo run this function as it is written; ``inner``: and whatever it calls (never to be traced through)."""
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip if inner else default))
    if inner:
        vars(function)["_torchdynamo_disable"] = True
    return function


class Patches:
    """What was replaced, so that `restore` leaves every owner as it was.

    A wrapper only observes: the original is called with the caller's own arguments, its result and its exception
    pass through. What fails in an observer is handed to ``fault`` and never reaches the run. After `restore` a
    wrapper that somebody kept a reference to is a plain pass-through.
    """

    def __init__(
        self, fault: Callable[[str, BaseException], None], silent: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._fault = fault
        self._silent = silent
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self.live = False
        self.lock = threading.RLock()  # one thread at a time observes

    def around(
        self,
        owner: Any,
        name: str,
        before: Before | None = None,
        after: After | None = None,
        failed: Failed | None = None,
    ) -> None:
        """Observe calls of ``owner.name``. `before` may return a token that `after` and `failed` receive."""
        if not hasattr(owner, name):
            return
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not_now() or not self.live:
                return original(*args, **kwargs)
            token = self.observe(f"before {name}", before, args, kwargs) if before is not None else None
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if failed is not None:
                    self.observe(f"failed {name}", failed, token, error)
                raise
            if after is not None:
                self.observe(f"after {name}", after, token, result, args, kwargs)
            return result

        hide(wrapper)
        uncompiled(wrapper, inner=False)
        self.replace(owner, name, wrapper)
        if isinstance(owner, types.ModuleType):
            for module in list(sys.modules.values()):  # `from torch.nn.utils import clip_grad_norm_`, before us
                if module is not owner and getattr(module, "__dict__", {}).get(name) is original:
                    self.replace(module, name, wrapper)

    def observe(self, name: str, observer: Callable[..., Any], *args: Any) -> Any:
        """Call an observer out of the look's sight; what fails in it is told and gives None."""
        try:
            with self.lock, self._silent():
                return observer(*args)
        except Exception as error:
            self._fault(name, error)
            return None

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Set ``owner.name`` to ``new``, remembering what stood there (or that nothing did)."""
        before = vars(owner).get(name, _ABSENT)
        if isinstance(before, staticmethod):
            new = staticmethod(new)
        setattr(owner, name, new)
        self._undo.append((owner, name, before, vars(owner).get(name)))

    def restore(self) -> None:
        self.live = False
        while self._undo:
            owner, name, before, ours = self._undo.pop()
            if vars(owner).get(name) is not ours:
                continue  # somebody wrapped our wrapper: theirs stays, ours passes through
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


uncompiled(Patches.observe)
uncompiled(not_now, inner=False)
