"""Keeping our wrappers' frames out of what a script shows of its stack."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

# `warnings` does not count a frame as a caller whose file name holds these two words (it means the import system's),
# and tracebacks are cut by this folder's name.
_HIDDEN = os.path.join(os.path.dirname(__file__), "importlib._bootstrap")


def hide(function: Callable[..., Any]) -> None:
    """Make a wrapper's frames invisible to ``warnings`` and to the tracebacks that `launch` shows."""
    assert isinstance(function, types.FunctionType)
    function.__code__ = function.__code__.replace(co_filename=_HIDDEN)
