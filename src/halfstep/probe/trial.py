"""Gradients taken again and again from one model that is afterwards as it was."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import MisuseError
from halfstep.weigh import weigh

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far rounding may take an accumulated gradient from the big batch's, relative to Σ‖contribution‖."""


@dataclass(frozen=True)
class Run:
    """One forward and backward."""

    loss: float
    """As ``loss_fn`` returned it."""
    gradients: dict[str, Tensor]
    """Of share · loss, by parameter name; zeros where no gradient came."""
    dtype: torch.dtype
    """The lowest precision a result in the loss's graph had."""
    supervised: int | None
    """Elements the loss's first term averages or sums over, where its graph tells."""


class Trial:
    """A model, a loss, the micro-batches of one group, and the big batch they are parts of.

    ``shares`` are what the micro-batches' losses are multiplied by; 0 leaves a micro-batch out altogether.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        batches: Sequence[Any],
        whole: Any,
        shares: Sequence[float],
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.batches = list(batches)
        self.whole = whole
        self.shares = tuple(shares)
        self._start = RandomState()

    def big(self, *, another_draw: bool = False) -> Run:
        """The big batch's gradient, from the random state the trial began with or from another."""
        self._start.restore()
        if another_draw:
            torch.rand(97)
            torch.manual_seed(int(torch.randint(2**31, ())))
        return self._run(self.whole, 1.0)

    def accumulated(self) -> tuple[dict[str, Tensor], dict[int, Run]]:
        """The sum of the contributions in the dtype ``.grad`` has, and each contribution that was run."""
        self._start.restore()
        total: dict[str, Tensor] = {}
        runs: dict[int, Run] = {}
        for k, (batch, share) in enumerate(zip(self.batches, self.shares, strict=True)):
            if share == 0:
                continue
            runs[k] = self._run(batch, share)
            for name, gradient in runs[k].gradients.items():
                total[name] = total[name] + gradient if name in total else gradient
        return total, runs

    def alone(self, k: int) -> Run:
        """The gradient of micro-batch ``k``'s loss by itself, undivided."""
        self._start.restore()
        return self._run(self.batches[k], 1.0)

    def _run(self, batch: Any, share: float) -> Run:
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for parameter in parameters.values():
            parameter.grad = None
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise MisuseError(f"loss_fn returned {shown}", "return the loss as a scalar tensor: loss_fn(model, batch)")
        if not loss.requires_grad:
            raise MisuseError("the loss does not depend on any parameter", "use the model that loss_fn is handed")
        dtype = lowest_dtype(loss)
        weighing = weigh(loss)
        torch.autograd.backward(loss * share)
        terms = weighing.read()
        weighing.remove()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense() if p.grad.is_sparse else p.grad
            for name, p in parameters.items()
        }
        for parameter in parameters.values():
            parameter.grad = None
        return Run(float(loss.detach()), gradients, dtype, terms[0].supervised if terms else None)


def norm(gradients: dict[str, Tensor]) -> float:
    """The 2-norm over all gradients, summed in FP64."""
    return math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))


def lowest_dtype(loss: Tensor, budget: int = 100_000) -> torch.dtype:
    """The lowest precision among the floating-point results in the loss's graph, read from the graph's metadata."""
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    lowest = order.index(loss.dtype) if loss.dtype in order else 1
    stack: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while stack and budget:
        budget -= 1
        node = stack.pop()
        for result in getattr(node, "_input_metadata", ()):
            if result.dtype in order:
                lowest = max(lowest, order.index(result.dtype))
        for child, _ in node.next_functions if node is not None else ():
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return order[lowest]


class RandomState:
    """Where every generator a model may draw from stands: torch's on all devices, Python's, NumPy's if imported."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        device = torch.accelerator.current_accelerator(check_available=True)
        self._device: Any = torch.get_device_module(device) if device is not None and device.type != "cpu" else None
        self._all = hasattr(self._device, "get_rng_state_all")
        if self._device is not None:
            self._states = self._device.get_rng_state_all() if self._all else self._device.get_rng_state()

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._device is not None:
            (self._device.set_rng_state_all if self._all else self._device.set_rng_state)(self._states)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a block and put everything back: parameters, buffers, gradients, training modes, random state.

    Tensors are written only where their values changed, and are the same objects afterwards.
    """
    state = RandomState()
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (slots, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        for slots, name, tensor, value in kept:
            slots[name] = tensor
            with torch.no_grad():
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        state.restore()
