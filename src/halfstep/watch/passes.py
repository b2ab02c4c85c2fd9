"""What a pass through a checkpointed function ran, and where its own backward stands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from halfstep.events import Place
from halfstep.watch.autocasts import name_of
from halfstep.watch.look import Operation
from halfstep.watch.place import is_users

_TENSORS = 2048  # remembered of one forward
PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "convolution"))
_PASSING = frozenset(
    ("_to_copy", "detach", "view", "t", "alias", "clone", "transpose", "expand", "reshape", "_unsafe_view")
)


def note(operators: list[tuple[str, str]], operation: Operation) -> None:
    """An operator's name, and the dtype in which a product computed."""
    name, out = operation.name, operation.out
    if name not in _PASSING and len(operators) < _TENSORS:
        product = name in PRODUCTS and isinstance(out, torch.Tensor)
        operators.append((name, name_of(out.dtype) if product else ""))


def recomputing_line() -> Place | None:
    """The line of the custom function's own backward that is running now, where it is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("backward", "vjp") and is_users(code):
            return Place(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return None


def parted(first: list[tuple[str, str]], again: list[tuple[str, str]]) -> tuple[str, str] | None:
    """The dtypes of the first product that computed in another one when it was computed again."""
    before, after = [d for _, d in first if d], [d for _, d in again if d]
    if len(before) != len(after):
        return None
    return next(((a, b) for a, b in zip(before, after, strict=True) if a != b), None)


def is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def closure(function: Any) -> dict[str, Any]:
    """The names a function has closed over, with their values."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    names: Sequence[str] = code.co_freevars if code is not None else ()
    out: dict[str, Any] = {}
    for name, cell in zip(names, cells or (), strict=False):
        try:
            out[name] = cell.cell_contents
        except ValueError:
            continue
    return out
