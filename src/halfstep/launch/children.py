"""Processes that a script starts by multiprocessing: a call made in each spawned one, and the exceptions that end them.

A forked child carries on with everything of its parent; a spawned one begins as a bare interpreter that reads from its
parent what it is to do. There a call is slipped in, which runs before any line of the script's.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.launch.arrival import when_imported
from halfstep.launch.ending import cut
from halfstep.launch.frames import hide

# What the child runs. It may find no halfstep (then it is not watched), and must never fail for it.
_BEGIN = """
try:
    import sys
    sys.path.append(home)
    try:
        from halfstep.launch.children import arrived
    finally:
        sys.path.remove(home)
    arrived(*words)
except Exception:
    pass
"""
_HOME = str(Path(__file__).resolve().parents[2])


class _Begin:
    """In the parent a word on its way; unpickled, in the child, the call."""

    def __init__(self, *words: Any) -> None:
        self._words = words

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return exec, (_BEGIN, {"home": _HOME, "words": self._words})


def in_spawned(module: str, function: str, *words: str | int | None) -> None:
    """In each process that multiprocessing spawns (or its fork server forks) from now on: once torch was imported
    there, call ``module.function(*words)``."""

    def wrap() -> None:
        from multiprocessing import spawn

        original = spawn.get_preparation_data

        def get_preparation_data(*args: Any, **kwargs: Any) -> dict[str, Any]:
            data = original(*args, **kwargs)
            data["halfstep"] = _Begin(module, function, *words)
            return data

        hide(get_preparation_data)
        spawn.get_preparation_data = get_preparation_data

    when_imported("multiprocessing.spawn", wrap)


def arrived(module: str, function: str, *words: str | int | None) -> None:
    """In the child."""
    when_imported("torch", lambda: getattr(importlib.import_module(module), function)(*words))


def tell_exceptions(told: Callable[[BaseException], None]) -> None:
    """Call ``told`` with the exception that ends this child of multiprocessing, as the child itself would never show.

    What runs at the end of such a child runs while the exception is on its way.
    """
    util = sys.modules.get("multiprocessing.util")
    original = getattr(util, "_exit_function", None)
    if util is None or original is None:
        return
    pid = os.getpid()

    def _exit_function(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):  # torch's own: it has written the exception down and leaves by sys.exit
            error = error.__context__ if error.code else None
        if error is not None and os.getpid() == pid:
            told(error)
        return original(*args, **kwargs)

    hide(_exit_function)
    util._exit_function = _exit_function  # type: ignore[attr-defined]


def cut_tracebacks() -> None:
    """Leave our own frames out of what this child of multiprocessing writes of its exception, on its end or for its
    parent to raise: both use these two."""
    for name in ("format_exc", "print_exc"):
        _cut_before(name, getattr(traceback, name))


def _cut_before(name: str, original: Callable[..., Any]) -> None:
    @functools.wraps(original)
    def shown(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            cut(error)
        return original(*args, **kwargs)

    hide(shown)
    setattr(traceback, name, shown)
