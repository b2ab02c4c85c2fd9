"""SEE: the only place that hooks torch. Turns a running script into events.

The package is itself callable, so that ``halfstep.watch()`` reads as one verb though this folder bears its name.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable

from halfstep.events import Finding
from halfstep.watch.session import Session

__all__ = ["Session", "watch"]


def watch(*, record: str | os.PathLike[str] | None = None, tell: Callable[[Finding], None] | None = None) -> Session:
    """Watch the updates made inside a ``with`` block (a test, a notebook cell).

    >>> with halfstep.watch() as session:
    ...     train()
    >>> session.findings

    ``record``: a directory to keep the run's events in; by default they are judged and forgotten. ``tell``: called
    with each error finding when it becomes certain. Nested use is safe: the outer session sees everything. On leaving,
    torch is exactly as it was.
    """
    return Session(record=record, tell=tell)


class _Verb(types.ModuleType):
    __call__ = staticmethod(watch)


__signature__ = inspect.signature(watch)  # what help() and editors show of the module, too
sys.modules[__name__].__class__ = _Verb
