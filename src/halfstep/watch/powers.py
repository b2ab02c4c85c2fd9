"""Dimensional analysis of the loss scale: which power of it does a value carry?

A norm of scaled gradients carries the scale once, its square twice, a ratio of two of them not at all. Multiplying or
dividing by the scale itself (whatever the script computed it from) lowers or raises the power; adding something that
carries another power makes a value that means nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfstep.events import Place
from halfstep.watch.gradients import Mark

# fmt: off
SAME = frozenset((
    "abs", "neg", "clone", "detach", "view", "reshape", "_unsafe_view", "flatten", "expand", "t", "transpose",
    "permute", "select", "slice", "unsqueeze", "squeeze", "cat", "stack", "sum", "mean", "max", "amax", "min", "amin",
    "_to_copy", "alias", "lift_fresh", "contiguous", "split", "unbind", "chunk", "index", "index_select",
    "masked_select", "topk", "sort", "median", "std", "relu", "nan_to_num", "maximum", "minimum", "narrow", "norm",
    "linalg_vector_norm", "_foreach_norm", "_foreach_abs", "view_as", "_reshape_alias", "clamp_min", "clamp_max",
    "as_strided", "gather",
))
MEASURES = frozenset((
    "sum", "mean", "max", "amax", "min", "amin", "norm", "linalg_vector_norm", "_foreach_norm", "median", "std", "dot",
    "var",
))
# fmt: on
PRODUCTS = frozenset(("mul", "mul_", "dot", "mm", "mv", "_foreach_mul", "vdot"))
QUOTIENTS = frozenset(("div", "div_", "_foreach_div"))
SUMS = frozenset(("add", "add_", "sub", "sub_", "rsub", "_foreach_add"))
EXPONENTS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "reciprocal": -1.0, "var": 2.0}
DIFFERENCES = frozenset(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
COMPARISONS = frozenset(("gt", "lt", "ge", "le"))
TINY = 1e-4  # a number added only to keep a quotient finite


@dataclass(slots=True, eq=False)
class Origin:
    """Where a value came from: gradients read (``penalty`` False), or gradients taken to go into a loss."""

    mark: Mark
    at: Place | None = None
    how: str = ""
    penalty: bool = False
    graph: bool = False
    owners: dict[int, int] | None = None
    told: bool = False


@dataclass(frozen=True, slots=True)
class Carried:
    """A value carries the scale to this power; ``norm``: the measure of gradients that it is computed from."""

    power: float
    origin: Origin
    norm: torch.Tensor | None = None
    measured: bool = False


class Powers:
    """Tensors that carry a power of the scale, for as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Carried]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, tensor: torch.Tensor) -> Carried | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def put(self, tensors: Any, carried: Carried) -> None:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self._known[id(tensor)] = (weakref.ref(tensor, self._forget(id(tensor))), carried)

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._known.pop(key, None)

        return forget

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._known.pop(id(tensor), None)


def power_of_factor(value: Any, mark: Mark) -> float:
    """The power of the scale that a plain factor is: 1 for the scale, -1 for its inverse, 0 for anything else."""
    number = number_of(value)
    scale = float(mark.scale)
    if number is None or number <= 0 or scale <= 0 or scale == 1.0:
        return 0.0
    for power in (1.0, -1.0, 2.0, -2.0, 0.5):
        if abs(number / scale**power - 1) < 1e-3:
            return power
    return 0.0


def number_of(value: Any) -> float | None:
    """A plain number, or the number of a tensor with one element."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    return None


def combined(name: str, args: list[tuple[Any, Carried | None]], exponent: Any) -> Carried | None:
    """What the result of a product, quotient or power carries; None where that is not known.

    ``args``: the operator's arguments with what they carry.
    """
    first = next(c for _, c in args if c is not None)
    if name in EXPONENTS:
        return replace(first, power=first.power * EXPONENTS[name])
    if name == "pow":
        number = number_of(exponent)
        return None if number is None else replace(first, power=first.power * number)
    sign = -1.0 if name in QUOTIENTS else 1.0
    power = 0.0
    for place, (value, carried) in enumerate(args[:2]):
        own = carried.power if carried is not None else power_of_factor(value, first.origin.mark)
        power += own if place == 0 else sign * own
    return replace(first, power=power)
