"""Values read late: copied off the device without waiting, waited for when somebody asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Number = float | Tensor


class Mail:
    """A few numbers on their way to the host.

    Device values are stacked and copied to pinned memory without blocking; ``read`` waits for the copy's own event,
    not for the work queued after it.
    """

    def __init__(self, values: dict[str, Number]) -> None:
        self._values: dict[str, Number] = dict(values)
        self._keys = [key for key, value in values.items() if isinstance(value, Tensor)]
        self._copy: Tensor | None = None
        self._event: Any = None
        if not self._keys:
            return
        tensors = [values[key] for key in self._keys]
        device = tensors[0].device  # type: ignore[union-attr]
        dtype = torch.float32 if device.type == "mps" else torch.float64
        packed = torch.stack([t.detach().reshape(()).to(device=device, dtype=dtype) for t in tensors])  # type: ignore[union-attr]
        if device.type == "cpu":
            self._copy = packed
            return
        target = torch.empty(packed.shape, dtype=dtype, pin_memory=device.type == "cuda")
        self._copy = target.copy_(packed, non_blocking=True)
        self._event = torch.Event(device)
        self._event.record()

    def read(self) -> dict[str, float]:
        """The numbers, waited for at most once."""
        if self._copy is not None:
            if self._event is not None:
                self._event.synchronize()
            for key, value in zip(self._keys, self._copy.tolist(), strict=True):
                self._values[key] = value
            self._copy = self._event = None
        return self._values  # type: ignore[return-value]


def host(tensor: Tensor) -> float:
    """The number in a one-element tensor, now. On a CPU nothing is dispatched and nothing waited for."""
    value = tensor.tolist()
    while isinstance(value, list):
        value = value[0]
    return float(value)
