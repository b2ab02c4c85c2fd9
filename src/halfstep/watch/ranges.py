"""Tensors as a look measures them: which storage, how large, how far from finite."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MEASURED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128))
HALF = frozenset((torch.float16, torch.bfloat16))


class Held(Protocol):
    """A weak hold of a storage: its address is not given to another while this lives."""

    def expired(self) -> bool: ...


def held(tensor: torch.Tensor) -> Held:
    reference: Held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return reference


def address(tensor: torch.Tensor) -> int:
    """Of its storage: views of one tensor have one address."""
    return int(tensor.untyped_storage()._cdata)


def whole(tensor: torch.Tensor) -> bool:
    """Whether this tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def measurable(value: Any) -> list[torch.Tensor]:
    """The tensors among an operator's outputs whose range can be told."""
    if isinstance(value, torch.Tensor):
        value = (value,)
    if not isinstance(value, (tuple, list)):
        return []
    return [
        v
        for v in value
        if isinstance(v, torch.Tensor)
        and v.dtype in MEASURED
        and v.numel()
        and v.layout is torch.strided
        and v.device.type != "meta"
    ]


def bounds(tensor: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest element; both NaN where one is."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    low, high = torch.aminmax(tensor)
    if low.is_cpu:
        return low.item(), high.item()
    both: list[float] = torch.stack((low, high)).tolist()
    return both[0], both[1]


def min_(*values: float) -> float:
    return math.nan if any(v != v for v in values) else min(values)


def max_(*values: float) -> float:
    return math.nan if any(v != v for v in values) else max(values)


def counted(tensor: torch.Tensor) -> dict[str, Any]:
    """How many elements are NaN or infinite, in how many rows, and in which columns where they are few."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    wrong = ~torch.isfinite(tensor)
    facts: dict[str, Any] = {
        "nans": int(torch.isnan(tensor).sum()),
        "wrong": int(wrong.sum()),
        "elements": tensor.numel(),
    }
    if tensor.dim() >= 1:
        rows = wrong.reshape(tensor.shape[0], -1).any(1)
        facts["rows"], facts["of_rows"] = int(rows.sum()), tensor.shape[0]
        facts["first_row"] = int(rows.to(torch.uint8).argmax())
    if tensor.dim() == 2:
        columns = wrong.any(0).nonzero().flatten()
        facts["columns"] = tuple(columns[:4].tolist())
        facts["of_columns"] = int(columns.numel())
    return facts
