"""Norms of gradients, one a parameter, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 16384  # elements a row: short enough that FP32 sums of squares on a CPU err by 1e-8
LONG = 1 << 18  # from here on a single CPU pass errs by more than 1e-6 (4e-3 at 50 million elements)


def norms_of(gradients: Sequence[Tensor], *, plain: bool, exact: bool) -> Tensor:
    """The 2-norm of every gradient, as one 1-dim tensor: FP32, or FP64 where a gradient is.

    ``plain``: all are dense FP32 tensors on one device. ``exact``: long tensors are summed by rows, where the device
    is a CPU; otherwise torch's own norm is taken, bit for bit what ``clip_grad_norm_`` computes.
    """
    if plain:
        if exact and gradients[0].device.type == "cpu" and any(g.numel() >= LONG for g in gradients):
            return torch.stack([_by_rows(g) if g.numel() >= LONG else _one(g) for g in gradients])
        return torch.stack(torch._foreach_norm(list(gradients), 2.0))
    values = [dense(g) for g in gradients]
    double = any(v.dtype in (torch.float64, torch.complex128) for v in values)
    dtype = torch.float64 if double else torch.float32
    device = values[0].device
    one = {v.dtype for v in values} <= {torch.float16, torch.bfloat16} and len({v.device for v in values}) == 1
    if one:  # a half-precision norm overflows or keeps three digits: accumulate in FP32
        return torch.stack(torch._foreach_norm(values, 2.0, dtype=torch.float32))
    return torch.stack([_one(v).to(device=device, dtype=dtype) for v in values])


def dense(gradient: Tensor) -> Tensor:
    """The stored values: of a sparse gradient those of its coalesced form, where an index occurs once."""
    if gradient.is_sparse:
        return gradient.coalesce()._values()
    return gradient


def _one(gradient: Tensor) -> Tensor:
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(gradient, 2.0, dtype=torch.float32 if half else None)
    return norm


def _by_rows(gradient: Tensor) -> Tensor:
    count = gradient.numel()
    flat = torch.as_strided(gradient, (count,), (1,), gradient.storage_offset())
    rows = count // ROW
    parts = [torch.linalg.vector_norm(flat[: rows * ROW].view(rows, ROW), 2.0, dim=1)]
    if rows * ROW < count:
        parts.append(torch.linalg.vector_norm(flat[rows * ROW :], 2.0).reshape(1))
    norm: Tensor = torch.linalg.vector_norm(torch.cat(parts) if len(parts) > 1 else parts[0], 2.0)
    return norm
