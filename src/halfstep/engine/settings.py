"""Settings as they were given -> as they are meant; what cannot be meant is refused with one clear error."""

from __future__ import annotations

import math
from typing import Any

import torch

from halfstep.errors import PolicyError

ON_NONFINITE = ("skip", "raise", "ignore")


def activated_of(value: Any) -> bool:
    """The first argument of the manager: a flag. A precision, device or dtype in its place is an error."""
    if isinstance(value, (str, torch.device, torch.dtype)):
        raise PolicyError(
            f"activated={value!r}: the first argument switches mixed precision on or off",
            f"MixedPrecisionManager(precision={value!r})" if value in ("fp16", "bf16", "fp32")
            else "MixedPrecisionManager(True, precision=…, device=…)",
        )  # fmt: skip
    if isinstance(value, int) or type(value).__name__ in ("bool", "bool_"):  # NumPy's flag, too
        return bool(value)
    raise PolicyError(f"activated={value!r}, of type {type(value).__name__}, is no flag", "True or False")


def norm_of(max_norm: Any) -> float | None:
    """``max_norm``: a positive, finite number; None does not clip."""
    if max_norm is None:
        return None
    value = number("max_norm", max_norm, "a positive number, or None not to clip")
    if not 0.0 < value < math.inf:
        raise PolicyError(f"max_norm={max_norm} is no norm", "a positive number, or None not to clip")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False (1 or 0), and nothing that merely counts as such: "no" would count as True."""
    if not (isinstance(value, int) and value in (0, 1)) and type(value).__name__ != "bool_":
        raise PolicyError(f"{name}={value!r}, of type {type(value).__name__}, is no flag", "True or False")
    return bool(value)


def number(name: str, value: Any, fix: str) -> float:
    """A real number; neither a flag nor the text of one."""
    if isinstance(value, (bool, str, bytes)):
        raise PolicyError(f"{name}={value!r}, of type {type(value).__name__}, is no number", fix)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"{name}={value!r}, of type {type(value).__name__}, is no number", fix) from error


def count(name: str, value: Any, fix: str) -> int:
    """A whole number, however it is written (2000.0 is one)."""
    whole = number(name, value, fix)
    if not whole.is_integer():
        raise PolicyError(f"{name}={value!r} is no whole number", fix)
    return int(whole)


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise PolicyError(f"unknown {name} {value!r}", f"one of {', '.join(map(repr, choices))}")
    return value
