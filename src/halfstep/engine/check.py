"""A tensor looked at by hand: is it finite, and how near is it to the end of its dtype's range."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.late import Mail
from halfstep.errors import MisuseError, NonFiniteError


class Check:
    """What ``manager.check(tensor, name)`` found; read when asked. True where every element is finite.

    ``nonfinite`` counts elements that are NaN or infinite, ``largest`` is the largest finite magnitude, ``headroom``
    the dtype's largest value over it.
    """

    def __init__(self, tensor: Tensor, name: str, update: int) -> None:
        if not isinstance(tensor, Tensor):
            raise MisuseError(
                f"check was given a {type(tensor).__name__}", "check(tensor, name): the tensor to look at"
            )
        self.name = name
        self.update = update
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self._limit = torch.finfo(tensor.dtype).max if tensor.dtype.is_floating_point else None
        values = tensor.detach()
        if tensor.numel() == 0 or self._limit is None:
            self._mail = Mail({"nonfinite": 0.0, "largest": 0.0})
            return
        finite = values.isfinite()
        largest = torch.where(finite, values.abs(), torch.zeros_like(values)).amax()
        self._mail = Mail({"nonfinite": (~finite).sum(), "largest": largest})

    @property
    def nonfinite(self) -> int:
        return int(self._mail.read()["nonfinite"])

    @property
    def largest(self) -> float:
        return self._mail.read()["largest"]

    @property
    def headroom(self) -> float | None:
        return None if self._limit is None or self.largest == 0.0 else self._limit / self.largest

    def __bool__(self) -> bool:
        return self.nonfinite == 0

    def require_finite(self) -> None:
        if not self:
            raise NonFiniteError(
                f"{self.nonfinite} of {math.prod(self.shape)} elements of {self.name!r} ({self.dtype}) are not finite",
                "keep the module it comes from in FP32 (manager.keep_fp32), or lower the loss scale",
            )

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "update": self.update,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            "headroom": self.headroom,
        }

    def __repr__(self) -> str:
        state = "finite" if self else f"{self.nonfinite} elements not finite"
        return f"Check({self.name}: {state}, largest {self.largest:.4g} of {self.dtype}'s {self._limit or 0:.4g})"
