"""What every module of a model put out, and which gradient arrived there: half precision held against FP32.

The FP32 pass is kept on the host; the half pass is compared with it as it runs, so that no second set of activations
is held on the device. Calls are matched by module and by their order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes

from halfstep.probe.micro_batch.exponents import Exponents, exponents
from halfstep.watch.calls import outputs_of
from halfstep.watch.ranges import HALF

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Key = tuple[str, int, int]  # module, its call, the tensor among its outputs


@dataclass(frozen=True)
class Difference:
    """How far a half-precision tensor is from its FP32 twin.

    ``error``: ‖half − FP32‖ / ‖FP32‖, infinite where half has non-finite elements that FP32 has not. ``cosine``: of the
    angle between them, None there. ``spoiled``: how many such elements.
    """

    error: float
    cosine: float | None
    spoiled: int


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # which has none


class Sums:
    """Adds up what a `Difference` needs, over several tensors, in FP64."""

    def __init__(self) -> None:
        self._apart = self._half = self._full = self._both = 0.0
        self._spoiled = self._seen = 0

    def add(self, half: Tensor, full: Tensor) -> None:
        wide = _widest(half)
        full = full.to(half.device, wide)
        half = half.to(wide)
        known = torch.isfinite(full)  # where FP32 is not finite either, precision is not to blame
        good = known & torch.isfinite(half)
        self._seen += int(known.sum())
        self._spoiled += int((known & ~good).sum())
        zero = torch.zeros((), dtype=wide, device=half.device)
        half, full = torch.where(good, half, zero), torch.where(good, full, zero)
        self._apart += float(((half - full) ** 2).sum())
        self._half += float((half**2).sum())
        self._full += float((full**2).sum())
        self._both += float((half * full).sum())

    def difference(self) -> Difference | None:
        """None where nothing was compared."""
        if not self._seen:
            return None
        if self._spoiled:
            return Difference(math.inf, None, self._spoiled)
        error = math.sqrt(self._apart / self._full) if self._full else math.inf if self._apart else 0.0
        sizes = math.sqrt(self._half * self._full)
        cosine = min(1.0, self._both / sizes) if sizes else 1.0 if self._half == self._full else 0.0
        return Difference(error, cosine, 0)


@dataclass
class Lost:
    """Elements of a half-precision gradient that FP32 keeps: how many are zero, how many subnormal.

    A zero whose FP32 twin, times the scale, is a normal number of the dtype was not lost to its range: a maximum or a
    ReLU, decided otherwise after rounding, sent the gradient elsewhere.
    """

    kept: int = 0
    zero: int = 0
    subnormal: int = 0
    square: float = 0.0
    square_zero: float = 0.0

    def add(self, half: Tensor, full: Tensor, scale: float) -> None:
        full = full.to(half.device, torch.float32)
        least = torch.finfo(half.dtype).smallest_normal
        there = (full != 0) & torch.isfinite(full)
        gone = there & (half == 0) & (full.abs() * scale < least)
        small = there & (half != 0) & (half.abs() < least)
        self.kept += int(there.sum())
        self.zero += int(gone.sum())
        self.subnormal += int(small.sum())
        squares = full.to(_widest(half)) ** 2
        self.square += float(squares[there].sum())
        self.square_zero += float(squares[gone].sum())


class _Watching:
    """A sight that is told of every floating-point output of every module, and of the gradient that arrives there."""

    def forward(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return _hooked(model, self._out, self._arrived)

    def backward(self, loss: Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _out(self, key: Key, tensor: Tensor) -> None:
        raise NotImplementedError

    def _arrived(self, key: Key, gradient: Tensor) -> None:
        raise NotImplementedError


class Full(_Watching):
    """The sight of the FP32 pass: keeps outputs and the gradients that arrived there, on the host."""

    def __init__(self) -> None:
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}

    def _out(self, key: Key, tensor: Tensor) -> None:
        self.outputs[key] = _copied(tensor)

    def _arrived(self, key: Key, gradient: Tensor) -> None:
        self.gradients[key] = _copied(gradient)


@dataclass
class Seen:
    """A module in both passes, before the numbers are drawn together. ``order``: when its first call returned."""

    order: int
    dtype: torch.dtype
    outputs: Sums = field(default_factory=Sums)
    gradients: Sums = field(default_factory=Sums)
    lost: Lost = field(default_factory=Lost)
    arrived: int | None = None
    """When its first gradient arrived."""
    output_exponents: Exponents = field(default_factory=Exponents)
    """Of the FP32 outputs."""
    gradient_exponents: Exponents = field(default_factory=Exponents)
    """Of the FP32 gradients there, unscaled."""


class Beside(_Watching):
    """The sight of the half pass: compares with the FP32 pass as it goes. ``scale``: carried by the gradients."""

    def __init__(self, full: Full, scale: float) -> None:
        self._full = full
        self._scale = scale
        self._arrivals = 0
        self.modules: dict[str, Seen] = {}

    def _out(self, key: Key, tensor: Tensor) -> None:
        twin = self._full.outputs.get(key)
        if twin is None or twin.shape != tensor.shape:
            return
        seen = self.modules.setdefault(key[0], Seen(len(self.modules), tensor.dtype))
        if tensor.dtype in HALF:
            seen.dtype = tensor.dtype
        seen.outputs.add(tensor.detach(), twin)
        seen.output_exponents += exponents(twin)

    def _arrived(self, key: Key, gradient: Tensor) -> None:
        twin, seen = self._full.gradients.get(key), self.modules.get(key[0])
        if twin is None or seen is None or twin.shape != gradient.shape:
            return
        if seen.arrived is None:
            seen.arrived = self._arrivals
            self._arrivals += 1
        seen.gradients.add(gradient.detach().float() / self._scale, twin)
        seen.gradient_exponents += exponents(twin)
        if gradient.dtype in HALF:
            seen.lost.add(gradient.detach(), twin, self._scale)


def plain_name(name: str) -> str:
    """A module's name without what the compiler's wrapper puts into it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod").removesuffix("_orig_mod")


def _copied(tensor: Tensor) -> Tensor:
    wide = tensor.detach().to("cpu", torch.float64 if tensor.dtype is torch.float64 else torch.float32)
    return wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide  # a later operator may write into it


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What is computed here is no part of the pass: no mode sees or changes it, no autocast, no graph."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch.no_grad():
        yield


@contextlib.contextmanager
def _hooked(
    model: nn.Module,
    out: Callable[[Key, Tensor], None],
    arrived: Callable[[Key, Tensor], None],
) -> Iterator[None]:
    """``out`` is called with every floating-point output of the model's modules, ``arrived`` with its gradient."""
    names = {module: plain_name(name) for name, module in model.named_modules()}
    calls: dict[str, int] = {}

    def returned(module: nn.Module, args: Any, result: Any) -> None:
        name = names.get(module)
        # What is computed again inside a backward (checkpointing) was seen in the forward.
        if name is None or torch._C._current_autograd_node() is not None:
            return
        number = calls[name] = calls.get(name, -1) + 1
        with aside():
            for index, tensor in enumerate(outputs_of(result)):
                if tensor.dtype not in _FLOATS or not tensor.numel() or tensor.layout is not torch.strided:
                    continue
                key = (name, number, index)
                out(key, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(_telling(key, arrived))  # type: ignore[no-untyped-call]

    handle = register_module_forward_hook(returned)
    try:
        yield
    finally:
        handle.remove()


def _telling(key: Key, arrived: Callable[[Key, Tensor], None]) -> Callable[[Tensor], None]:
    def tell(gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            with aside():
                arrived(key, gradient)

    return tell
