"""A few elements of a tensor, kept to be compared with those of another; where random numbers came from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_ELEMENTS = 1024
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MANY = 1 << 14
SOURCES = ("default", "python", "numpy")


class Sample:
    """What a tensor was: its shape, dtype and some elements; ``storage`` tells whose memory is the same."""

    __slots__ = ("dtype", "shape", "storage", "values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.values = taken(tensor)
        self.storage = None if self.values is None else StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def apart(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """How far ``tensor`` is from it, relative to the larger; None for the same memory or where nothing was kept."""
        if self.values is None or self.storage is None or tensor.shape != self.shape:
            return None
        again = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if again.cdata == self.storage.cdata:
            return None  # a weight, a buffer, an input: not computed again (the weak reference keeps the address taken)
        values = taken(tensor)
        if values is None or values.device != self.values.device:
            return None
        size = torch.maximum(torch.linalg.vector_norm(self.values), torch.linalg.vector_norm(values))
        return torch.nan_to_num(torch.linalg.vector_norm(self.values - values) / size.clamp_min(1e-30), 0.0, 0.0, 0.0)


def taken(tensor: torch.Tensor) -> torch.Tensor | None:
    """Elements spread evenly over its memory, in FP32; None for integers (seeds, workspaces) and special tensors."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if not tensor.is_floating_point() and tensor.dtype is not torch.bool:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.device.type == "meta":
        return None
    flat = tensor.detach()
    if flat.is_contiguous():
        flat = flat.view(-1)
    elif torch.ops.aten.is_non_overlapping_and_dense(flat):
        flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())
    else:
        return None
    few = flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS]
    return few.to(torch.float32, copy=True)


def random_states() -> tuple[Any, ...]:
    """The states of the sources named in `SOURCES`; reading them draws nothing."""
    numpy = sys.modules.get("numpy.random")
    state = numpy.get_state() if numpy is not None else None
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if state is None else (state[2], bytes(state[1][:4]), state[1].tobytes()),
    )


def moved(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[str, ...]:
    """Which sources were drawn from between two moments."""
    same = (torch.equal(before[0], after[0]), before[1] == after[1], before[2] == after[2])
    return tuple(name for name, unmoved in zip(SOURCES, same, strict=True) if not unmoved)


def pick(tensor: torch.Tensor) -> torch.Tensor:
    """Elements at even distances, some 16,000 at most: the same ones of every tensor of one size."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _MANY)]
