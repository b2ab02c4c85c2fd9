"""How long a learning-rate schedule means to be, asked of the schedule itself."""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

_NAMES = (
    "num_training_steps",
    "total_steps",
    "total_updates",
    "max_steps",
    "max_updates",
    "total_iters",
    "max_iters",
    "num_steps",
    "t_total",
    "t_max",
    "T_max",
    "total",
)
_LONGEST = 1 << 22
_A_OCTAVE = 32  # points looked at between n and 2n
_VANISHED = 1e-6  # of its largest value: a factor that fades for ever has no end
_HARMLESS = {
    "min",
    "max",
    "abs",
    "float",
    "int",
    "round",
    "pow",
    "len",
    "math",
    "sqrt",
    "cos",
    "sin",
    "exp",
    "pi",
    "tau",
}
_WRITING = {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "IMPORT_NAME", "YIELD_VALUE", "DELETE_SUBSCR"}


def length(scheduler: Any) -> int | None:
    """The calls after which a schedule has run its course; None where it has no such end.

    A chain is as long as its milestones say; warm-up and decay in sequence add up. Warm-ups by themselves and
    schedules that repeat on purpose have no end to reach.
    """
    for kind, name in (("OneCycleLR", "total_steps"), ("CosineAnnealingLR", "T_max"), ("PolynomialLR", "total_iters")):
        if _is(scheduler, kind):
            return _whole(getattr(scheduler, name, None))
    if _is(scheduler, "LinearLR"):
        falls = getattr(scheduler, "end_factor", 1.0) < getattr(scheduler, "start_factor", 1.0)
        return _whole(scheduler.total_iters) if falls else None
    if _is(scheduler, "LambdaLR"):
        lengths = [n for n in map(of_function, scheduler.lr_lambdas) if n is not None]
        return max(lengths) if lengths else None
    milestones, inner = getattr(scheduler, "_milestones", None), getattr(scheduler, "_schedulers", None)
    if milestones and inner:
        last = length(inner[-1])
        return None if last is None else int(milestones[-1]) + last
    if inner:
        lengths = [n for n in map(length, inner) if n is not None]
        return max(lengths) if lengths else None
    if type(scheduler).__module__.startswith("torch."):
        return None
    return next((n for n in (_whole(getattr(scheduler, name, None)) for name in _NAMES) if n is not None), None)


def overrun(scheduler: Any) -> str:
    """What calls beyond its length do: the rate "rises", "stays", or the call "raises"; "" where nobody knows."""
    if _is(scheduler, "OneCycleLR"):
        return "raises"
    if _is(scheduler, "CosineAnnealingLR"):
        return "rises"
    if _is(scheduler, "PolynomialLR") or _is(scheduler, "LinearLR"):
        return "stays"
    inner = getattr(scheduler, "_schedulers", None)
    return overrun(inner[-1]) if inner else ""


def of_function(function: Any) -> int | None:
    """The length of a factor given as a function of the position.

    It is asked of the numbers it was built with (a bound argument, a variable it closes over, an attribute), where one
    is named like a length. Otherwise, and only if its code can do nothing but arithmetic, it is tried: its length is
    where it stops falling.
    """
    named = _named(function)
    if named is not None:
        return named
    return _tried(function) if isinstance(function, types.FunctionType) and _is_arithmetic(function) else None


def _is(scheduler: Any, name: str) -> bool:
    kind = getattr(lr_scheduler, name)
    return isinstance(scheduler, kind) and type(scheduler).__module__.startswith("torch.")


def _whole(value: Any) -> int | None:
    """A length as an integer; lengths that came of a division are whole floats now and then."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if value > 0 and math.isfinite(value) and value == int(value) else None


def _named(function: Any) -> int | None:
    found: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        found.update(function.keywords)
        names = getattr(getattr(function.func, "__code__", None), "co_varnames", ())
        found.update(zip(names, function.args, strict=False))
        function = function.func
    if isinstance(function, types.FunctionType):
        space = function.__globals__
        found.update({name: space[name] for name in function.__code__.co_names if name in space})
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            found.setdefault(name, _content(cell))
    elif not isinstance(function, type):
        found.update(getattr(function, "__dict__", {}))
    return next((n for n in (_whole(found.get(name)) for name in _NAMES) if n is not None), None)


def _is_arithmetic(function: types.FunctionType) -> bool:
    """Whether this code reads numbers and computes, and can do nothing else."""
    code = function.__code__
    if code.co_argcount != 1 or any(isinstance(c, types.CodeType) for c in code.co_consts):
        return False
    if any(instruction.opname in _WRITING for instruction in dis.get_instructions(code)):
        return False
    space = function.__globals__
    for name in code.co_names:
        value = space.get(name, getattr(builtins, name, None))
        if name in _HARMLESS and (value is None or value is math or _is_harmless(value)):
            continue
        if not isinstance(value, (int, float, list, tuple, DataLoader)):  # of the last three, the length
            return False
    inside = (int, float, types.NoneType, list, tuple, DataLoader)
    return all(isinstance(_content(c), inside) for c in function.__closure__ or ())


def _is_harmless(value: Any) -> bool:
    return isinstance(value, (types.BuiltinFunctionType, type)) and value.__module__ in ("builtins", "math")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _tried(function: Callable[[int], Any]) -> int | None:
    """Where the factor stops falling: it turns up again, or is the same ever after."""
    try:
        points = list(_points())
        values = [_real(function(n)) for n in points]
        top = max(range(len(values)), key=lambda i: values[i])
        while top + 1 < len(values) and values[top + 1] == values[top]:
            top += 1  # where warm-up meets decay the factor stays for a call
        low = top
        while low + 1 < len(values) and values[low + 1] < values[low] and values[low] > 0:
            low += 1
        end = values[low]
        if low == top or low + 1 >= len(values) or values[low - 1] < _VANISHED * values[top]:
            return None
        if end > 0 and values[low + 1] == end and any(v != end for v in values[low:]):
            return None  # a stair, not an end
        left, right = points[max(low - 1, 0)], points[low + 1]
        return min(range(left, right + 1), key=lambda n: (max(_real(function(n)), 0.0), n))
    except Exception:
        return None  # it does not take such positions


def _real(value: Any) -> float:
    return 0.0 if isinstance(value, complex) else float(value)  # a root of a negative number: the end lies before


def _points() -> Iterator[int]:
    n = 0
    while n < _LONGEST:
        yield n
        n = max(n + 1, math.ceil(n * 2 ** (1 / _A_OCTAVE)))
