"""A script's half precision undone while it runs: the same script in FP32, line by line the same calls.

Undone at its sources, so that nothing computed from them is half: autocast regions do not switch on, scalers are made
disabled, halfstep's managers take precision "fp32", every dtype that a call of torch's is given as half is taken as
float32 (casts of models and tensors, factories, defaults), and TF32 stays off. What is left half all the same (weights
that a file brings, say) is not undone; the watch of that run sees it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
_KINDS = {f"torch.{place}{kind}Tensor" for kind in ("Half", "BFloat16") for place in ("", "cuda.")}
_GIVES = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer, torch.asarray)  # what numpy has as half


class Undone(TorchFunctionMode):
    """While on, half dtypes in calls are float32. ``counts``: what was undone, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward or func is torch.autograd.grad:
            func = inspect.unwrap(func)  # by name it finds what a watch put in its place, which has seen this call
        if func is torch.Tensor.half or func is torch.Tensor.bfloat16:
            self.counts["casts"] += 1
            return args[0].float()
        if any(map(is_half, args)) or any(map(is_half, kwargs.values())):
            self.counts["casts"] += 1
            args = tuple(torch.float32 if is_half(a) else a for a in args)
            kwargs = {k: torch.float32 if is_half(v) else v for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        if func in _GIVES and out.dtype in HALF:
            self.counts["casts"] += 1
            return out.float()
        return out


def is_half(value: Any) -> bool:
    """Whether a call's argument names a half dtype."""
    return value is torch.float16 or value is torch.bfloat16 or (isinstance(value, str) and value in _KINDS)


def undo(*, scalers: bool = True) -> Undone:
    """Undo the half precision of what runs from now on in this process, for good (it is a process of its own).

    ``scalers=False`` leaves loss scalers on: the arithmetic is FP32, the handling of the scale the script's own.
    """
    undone = Undone()
    undone.__enter__()  # type: ignore[no-untyped-call]
    _in_threads(undone)
    _autocast(undone)
    if scalers:
        _scaler(undone)
    _manager(undone)
    _defaults(undone)
    return undone


def _in_threads(undone: Undone) -> None:
    """A mode is a thread's own."""
    original = threading.Thread.run

    @functools.wraps(original)
    def run(thread: threading.Thread) -> None:
        with undone:
            original(thread)

    threading.Thread.run = run  # type: ignore[method-assign, assignment]


def _given(function: Callable[..., Any], name: str, value: Any, told: Callable[[Any], None]) -> Callable[..., Any]:
    """``function`` with one of its arguments always ``value``; ``told`` the one it was given (its default too)."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        told(bound)
        bound.arguments[name] = value
        return function(*bound.args, **bound.kwargs)

    return call


def _autocast(undone: Undone) -> None:
    kind = torch.amp.autocast_mode.autocast

    def told(bound: inspect.BoundArguments) -> None:
        undone.counts["autocast regions"] += bool(bound.arguments["enabled"])

    kind.__init__ = _given(kind.__init__, "enabled", False, told)  # type: ignore[method-assign]
    switch: Any = torch.set_autocast_enabled

    def set_autocast_enabled(*args: Any) -> None:  # (enabled) or (device type, enabled)
        switch(*args[:-1], False)

    torch.set_autocast_enabled = set_autocast_enabled  # type: ignore[assignment]


def _scaler(undone: Undone) -> None:
    from halfstep.engine.scale import LossScale

    kind = torch.amp.GradScaler
    original = kind.__init__

    def told(bound: inspect.BoundArguments) -> None:
        undone.counts["scalers"] += bool(bound.arguments["enabled"])

    disabled = _given(original, "enabled", False, told)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # A manager's follows the precision of its manager.
        (original if isinstance(self, LossScale) else disabled)(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]


def _manager(undone: Undone) -> None:
    from halfstep.engine.precision import Precision

    def told(bound: inspect.BoundArguments) -> None:
        undone.counts["managers"] += bound.arguments["name"] != "fp32" and bool(bound.arguments["activated"])

    Precision.__init__ = _given(Precision.__init__, "name", "fp32", told)  # type: ignore[method-assign]


def _defaults(undone: Undone) -> None:
    default = torch.set_default_dtype

    def set_default_dtype(d: Any, /) -> None:
        undone.counts["casts"] += is_half(d)
        default(torch.float32 if is_half(d) else d)

    torch.set_default_dtype = set_default_dtype
    torch.set_float32_matmul_precision("highest")
    torch.set_float32_matmul_precision = lambda precision: None
    torch.backends.cudnn.allow_tf32 = False
