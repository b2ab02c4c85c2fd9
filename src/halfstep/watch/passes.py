"""What a pass through a checkpointed function ran, and where its own backward stands."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from halfstep.events import Place
from halfstep.watch.autocasts import Region, name_of
from halfstep.watch.look import Operation
from halfstep.watch.place import is_users
from halfstep.watch.samples import Sample, moved, random_states

_OPERATORS = 2048  # remembered of one pass
PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "convolution"))
_PASSING = frozenset(
    ("_to_copy", "detach", "view", "t", "alias", "clone", "transpose", "expand", "reshape", "_unsafe_view")
)


class Ran(NamedTuple):
    """One operator: the dtype in which a product computed, the numbers that it was called with."""

    name: str
    dtype: str
    numbers: tuple[float, ...]


class Pass:
    """The operators of one pass through a function, where they were looked at; casts and views are left out."""

    __slots__ = ("ran",)

    def __init__(self) -> None:
        self.ran: list[Ran] = []

    def __bool__(self) -> bool:
        return bool(self.ran)

    def note(self, operation: Operation) -> None:
        name, out = operation.name, operation.out
        if name in _PASSING or len(self.ran) >= _OPERATORS:
            return
        dtype = name_of(out.dtype) if name in PRODUCTS and isinstance(out, torch.Tensor) else ""
        values = (*operation.args, *operation.kwargs.values())
        self.ran.append(Ran(name, dtype, tuple(v for v in values if isinstance(v, (int, float)))))

    def repeats(self, first: Pass) -> bool:
        """Whether it ran what another pass ran, perhaps without what that one did before and after."""
        before, after = [r.name for r in first.ran], [r.name for r in self.ran]
        if Counter(n for n in before if n in PRODUCTS) != Counter(n for n in after if n in PRODUCTS):
            return False
        return any(before[i : i + len(after)] == after for i in range(len(before) - len(after) + 1))

    def other_dtype(self, first: Pass) -> tuple[str, str] | None:
        """The dtypes of the first product that computed in another one than in a pass of as many."""
        before, after = [r.dtype for r in first.ran if r.dtype], [r.dtype for r in self.ran if r.dtype]
        if len(before) != len(after):
            return None
        return next(((a, b) for a, b in zip(before, after, strict=True) if a != b), None)

    def other_numbers(self, first: Pass) -> str:
        """The first operator that was called with other numbers, as far as both went the same way; "" for none."""
        for a, b in zip(first.ran, self.ran, strict=False):
            if a.name != b.name:
                break
            if a.numbers != b.numbers:
                return a.name
        return ""


class First:
    """What is known of one checkpointed forward."""

    __slots__ = (
        "__weakref__",
        "at",
        "autocast",
        "by",
        "drew",
        "drew_at",
        "operators",
        "preserves",
        "samples",
        "states",
    )

    def __init__(self, by: str, at: Place | None) -> None:
        self.by = by
        self.at = at
        self.autocast = ""
        self.samples: list[Sample] = []
        self.drew: tuple[str, ...] = ()
        self.drew_at: Place | None = None
        self.preserves: bool | None = None
        self.operators = Pass()
        self.states: tuple[Any, ...] | None = random_states()

    def ended(self) -> None:
        if self.states is not None:
            self.drew += moved(self.states, random_states())
            self.states = None


class Again:
    """One recomputation, compared with its first forward tensor by tensor."""

    def __init__(self, first: First) -> None:
        self.first = first
        self.at = first.at
        self.autocast = ""
        self.dtypes: tuple[str, str] | None = None  # of the first tensor that has another dtype than it had
        self.apart: list[torch.Tensor] = []
        self.operators = Pass()
        self._index = 0

    def meets(self, tensor: torch.Tensor) -> None:
        if self._index >= len(self.first.samples):
            return
        sample = self.first.samples[self._index]
        self._index += 1
        if tensor.dtype is not sample.dtype:
            self.dtypes = self.dtypes or (name_of(sample.dtype), name_of(tensor.dtype))
            return
        apart = sample.apart(tensor)
        if apart is not None:
            self.apart.append(apart)


class Backing:
    """The backward of a custom function under way: the region it entered first, the module it called first.

    ``operators``: those that ran in it with gradients enabled.
    """

    __slots__ = ("at", "called", "depth", "first", "operators", "region")

    def __init__(self, first: First | None, depth: int) -> None:
        self.first = first
        self.depth = depth
        self.region: Region | None = None
        self.at: Place | None = None
        self.called = False
        self.operators = Pass()

    def repeats(self, first: First) -> bool:
        """Whether it ran what the forward ran: the same operators, as far as anybody looked; else a module at least.

        Not every inner backward is of a recomputation: solvers differentiate one more of their own iterations.
        """
        if not first.operators or not self.operators:
            return self.called
        return self.operators.repeats(first.operators)


def recomputing_line() -> Place | None:
    """The line of the custom function's own backward that is running now, where it is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("backward", "vjp") and is_users(code):
            return Place(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return None


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
