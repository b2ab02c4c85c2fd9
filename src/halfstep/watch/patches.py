"""Replacing torch's functions while a session watches, and putting them back exactly."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from halfstep.launch import hide

Before = Callable[[tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]
Failed = Callable[[Any, BaseException], None]

_ABSENT = object()


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
            if not self.live:
                return original(*args, **kwargs)
            token = None
            if before is not None:
                try:
                    with self._silent():
                        token = before(args, kwargs)
                except Exception as error:
                    self._fault(f"before {name}", error)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if failed is not None:
                    try:
                        failed(token, error)
                    except Exception as own:
                        self._fault(f"failed {name}", own)
                raise
            if after is not None:
                try:
                    with self._silent():
                        after(token, result, args, kwargs)
                except Exception as error:
                    self._fault(f"after {name}", error)
            return result

        hide(wrapper)
        self.replace(owner, name, wrapper)
        if isinstance(owner, types.ModuleType):
            for module in list(sys.modules.values()):  # `from torch.nn.utils import clip_grad_norm_`, before us
                if module is not owner and getattr(module, "__dict__", {}).get(name) is original:
                    self.replace(module, name, wrapper)

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
