"""What rounding alone does to a gradient: FP32, with every module's numbers moved at random by as much.

Monte Carlo arithmetic in the small: outputs, the gradients that arrive there, and weights are each multiplied by
1 + u·ξ, with u the dtype's unit roundoff and ξ drawn evenly from [−1, 1]. Where many ReLUs and normalisations follow
each other, that alone can turn a gradient by tens of percent; then half precision is not worse than it must be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map

from halfstep.probe.micro_batch.modules import Sums, aside
from halfstep.probe.micro_batch.passes import Pass, Passes, substitute


class _Noise:
    """The sight of a pass that is disturbed. Its numbers are its own: the model's generators are not touched."""

    def __init__(self, size: float) -> None:
        self._size = size
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextlib.contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        inside = set(model.modules())
        substitute(model, lambda tensor: self._moved(tensor.detach()) if tensor.is_floating_point() else None)

        def returned(module: nn.Module, args: Any, result: Any) -> Any:
            return tree_map(self._disturbed, result) if module in inside else None

        handle = register_module_forward_hook(returned)
        try:
            yield
        finally:
            handle.remove()

    def backward(self, loss: Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _disturbed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        with aside():
            factor = self._factor(value)
        out = value * factor
        if out.requires_grad:
            out.register_hook(self._moved)  # type: ignore[no-untyped-call]
        return out

    def _moved(self, tensor: Tensor) -> Tensor:
        with aside():
            return tensor * self._factor(tensor)

    def _factor(self, tensor: Tensor) -> Tensor:
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        even = torch.rand(tensor.shape, generator=self._generators[device], device=device, dtype=tensor.dtype)
        return 1 + self._size * (2 * even - 1)


def rounding_error(passes: Passes, reference: Pass, dtype: torch.dtype) -> float:
    """‖disturbed − FP32‖ / ‖FP32‖ of the gradient of all parameters, for roundings of this dtype."""
    disturbed = passes.full(_Noise(torch.finfo(dtype).eps / 2))
    sums = Sums()
    for name, gradient in reference.gradients.items():
        if name in disturbed.gradients:
            sums.add(disturbed.gradients[name], gradient)
    difference = sums.difference()
    return 0.0 if difference is None else difference.error
