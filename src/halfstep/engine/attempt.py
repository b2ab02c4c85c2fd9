"""One attempt to change parameters: norm, unscale, clip and optimizer, in as few passes as the optimizer allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.engine.binding import Binding
from halfstep.engine.norms import norms_of
from halfstep.engine.replicas.sharded import whole_norms

EPSILON = 1e-6  # of clip_grad_norm_: max_norm / (norm + 1e-6)
Number = float | Tensor


@dataclass(slots=True)
class Attempt:
    """What an attempt measured. Tensors are still on the device."""

    norms: Tensor | None
    """One a gradient, not divided yet."""
    divisor: Number
    """What the gradients had to be divided by: loss scale and denominator."""
    grad_norm: Number
    coefficient: Number
    found_inf: Number
    """1.0 where a gradient was not finite."""


class Attempts:
    """Performs attempts under one policy. ``max_norm`` None: no clipping; ``heed``: non-finite gradients skip."""

    def __init__(self, max_norm: float | None, heed: bool) -> None:
        self.max_norm = max_norm
        self.heed = heed
        self._factors: dict[torch.device, Tensor] = {}

    def measure(self, binding: Binding, gradients: Sequence[Tensor], folded: bool) -> tuple[Tensor, Tensor]:
        """(norm of every gradient, their total), before any division."""
        norms = norms_of(gradients, plain=binding.plain, exact=folded)
        if binding.sharded:
            norms = whole_norms(norms, binding.having())
        return norms, torch.linalg.vector_norm(norms, 2.0)

    # --- the host knows the numbers: a CPU, or an optimizer that cannot fold and so has to wait anyway ---

    def on_host(
        self, binding: Binding, gradients: Sequence[Tensor], divisor: float, norms: Tensor | None, total: Tensor | None,
        value: float, folded: bool,
    ) -> Attempt:  # fmt: skip
        """``value`` is ``total``, read; both are of the undivided gradients (None and nan: not measured)."""
        grad_norm = value / divisor
        if total is not None and not math.isfinite(value) and self.heed:
            return Attempt(norms, divisor, grad_norm, self._coefficient(grad_norm), 1.0)
        coefficient = 1.0 if total is None else self._coefficient(grad_norm)
        if folded:
            factor = divisor / coefficient if coefficient != 0.0 else math.inf
            binding.seed_momentum(factor)
            self._step_folded(binding, None if factor == 1.0 else self._factor(gradients[0].device, factor), None)
        else:
            if total is not None and coefficient != 1.0:
                assert self.max_norm is not None
                # torch's own expression on tensors: the same bits as clip_grad_norm_ would multiply by
                true = total if divisor == 1.0 else total / divisor
                clip = torch.clamp(self.max_norm / (true + EPSILON), max=1.0)
                multiply(gradients, clip if divisor == 1.0 else clip / divisor, binding.plain)
            elif divisor != 1.0:
                multiply(gradients, 1.0 / divisor, binding.plain)
            for optimizer in binding.optimizers:
                optimizer.step()
        return Attempt(norms, divisor, grad_norm, coefficient, 0.0 if total is None or math.isfinite(value) else 1.0)

    def _coefficient(self, grad_norm: float) -> float:
        if self.max_norm is None:
            return 1.0
        coefficient = self.max_norm / (grad_norm + EPSILON)
        return 1.0 if coefficient > 1.0 else coefficient

    def _factor(self, device: torch.device, value: float) -> Tensor:
        factor = self._factors.get(device)
        if factor is None:
            factor = self._factors[device] = torch.ones((), dtype=torch.float32, device=device)
        return factor.fill_(value)

    # --- nothing is waited for: fused optimizers on an accelerator ---

    def on_device(
        self, binding: Binding, divisor: Number, norms: Tensor | None, total: Tensor | None, empty: Tensor | None
    ) -> Attempt:
        """``empty``: 1.0 where W turned out to be 0 on the device; the update is then made to do nothing."""
        device = binding.parameters[0].device
        if total is None:
            grad_norm = torch.full((), math.nan, device=device)
            factor = _as_factor(divisor, device)
            found = torch.zeros((), device=device)
            coefficient: Number = 1.0
        else:
            grad_norm = total / divisor
            found = (total * 0.0).nan_to_num_(nan=1.0)
            coefficient = 1.0
            factor = _as_factor(divisor, device)
            if self.max_norm is not None:
                inverse = torch.clamp((grad_norm + EPSILON) / self.max_norm, min=1.0)
                factor = _as_factor(inverse * divisor, device)
                coefficient = inverse.reciprocal()
        stop = found if self.heed else torch.zeros_like(found)
        if empty is not None:
            stop = torch.maximum(stop, empty)
        binding.seed_momentum(None)
        self._step_folded(binding, factor, stop)
        return Attempt(norms, divisor, grad_norm, coefficient, found)

    def _step_folded(self, binding: Binding, factor: Tensor | None, found_inf: Tensor | None) -> None:
        for optimizer in binding.optimizers:
            if factor is not None:
                optimizer.grad_scale = factor  # type: ignore[attr-defined]
            if found_inf is not None:
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                if factor is not None:
                    del optimizer.grad_scale  # type: ignore[attr-defined]
                if found_inf is not None:
                    del optimizer.found_inf  # type: ignore[attr-defined]


def multiply(gradients: Sequence[Tensor], factor: Number, plain: bool) -> None:
    """Multiply gradients in place, in one multi-tensor pass a device and dtype."""
    if plain:
        _multiply(list(gradients), factor)
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        kinds.setdefault((values.device, values.dtype), []).append(values)
    for (device, _), values_of_kind in kinds.items():
        _multiply(values_of_kind, factor.to(device) if isinstance(factor, Tensor) else factor)


def _multiply(tensors: list[Tensor], factor: Number) -> None:
    if isinstance(factor, Tensor):
        torch._foreach_mul_(tensors, factor)
    else:
        torch._foreach_mul_(tensors, factor)


def coalesce(parameters: Sequence[Tensor]) -> None:
    """Sparse gradients, each index once: their norm and their product are then those of the dense gradient."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse and not parameter.grad.is_coalesced():
            parameter.grad = parameter.grad.coalesce()


def _as_factor(divisor: Number, device: torch.device) -> Tensor:
    if isinstance(divisor, Tensor):
        return divisor.to(device=device, dtype=torch.float32)
    return torch.full((), divisor, dtype=torch.float32, device=device)
