"""An attribute of which every thread has its own: what is on the stack of one must not be taken for another's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class PerThread(Generic[Value]):
    """A class attribute ``name = PerThread(make)``: a thread finds what `make` made for it or it set itself."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self._slot = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._slot = f"{name} of threads"

    def __get__(self, thing: Any, owner: type[Any] | None = None) -> Value:
        known = thing.__dict__.get(self._slot)
        if known is None:
            known = thing.__dict__.setdefault(self._slot, threading.local())
        try:
            value: Value = known.value
        except AttributeError:
            value = known.value = self._make()
        return value

    def __set__(self, thing: Any, value: Value) -> None:
        known = thing.__dict__.get(self._slot)
        if known is None:
            known = thing.__dict__.setdefault(self._slot, threading.local())
        known.value = value
