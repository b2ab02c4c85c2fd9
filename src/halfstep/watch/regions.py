"""Which part of a gradient an operator sets to zero: all of it, a view, or where a mask or an index says."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.watch.look import Operation

ZEROING = {"zero_", "fill_", "mul_", "mul", "masked_fill_", "masked_fill", "index_put_", "index_fill_", "zeros_like"}
_KEYS = 1 << 20  # elements of a mask or index that is remembered


class Region:
    """The part that one operator zeroes, kept so that it can be compared with the next update's."""

    __slots__ = ("_dim", "_indices", "keys", "kind", "view")

    def __init__(self, kind: str, target: torch.Tensor, whole: bool, keys: list[Any], dim: int = 0) -> None:
        self.kind = kind  # "all", "factor", "mask", "index" or "dimension"
        self.view = None if whole else (tuple(target.shape), target.stride(), target.storage_offset())
        self._indices = keys
        self.keys = [k for k in keys if isinstance(k, torch.Tensor)]
        self._dim = dim

    def differs(self, other: Region) -> bool | torch.Tensor:
        """Whether another update's region is another one; may be a value still on its device."""
        if self.kind != other.kind or self.view != other.view:
            return True
        if [k.shape for k in self.keys] != [k.shape for k in other.keys]:
            return True
        if not self.keys:
            return False
        return torch.stack([(a != b).any() for a, b in zip(self.keys, other.keys, strict=True)]).any()

    def kept(self) -> Region:
        """The same, with keys of its own: the script may reuse its tensors."""
        kept = Region(self.kind, torch.empty(0), True, [_copied(k) for k in self._indices], self._dim)
        kept.view = self.view
        return kept

    def inside(self, grad: torch.Tensor) -> torch.Tensor:
        """True for the elements of this gradient that lie in the region."""
        with torch.no_grad():
            ones = torch.empty_strided(grad.shape, grad.stride(), device=grad.device).fill_(1)
            part = ones
            if self.view is not None:
                size, stride, offset = self.view
                part = ones.as_strided(size, stride, offset - grad.storage_offset())
            if self.kind == "all":
                part.zero_()
            elif self.kind == "factor":
                part.mul_(self._indices[0])
            elif self.kind == "mask":
                part.masked_fill_(self._indices[0], 0)
            elif self.kind == "index":
                part[tuple(slice(None) if k is None else k for k in self._indices)] = 0
            else:
                part.index_fill_(self._dim, self._indices[0], 0)
            return ones == 0


def region(operation: Operation) -> Region | None:
    """The part of its first argument that this operator sets to zero; None where it does not."""
    args = operation.args
    target = args[0] if args else None
    if operation.name not in ZEROING or not isinstance(target, torch.Tensor):
        return None
    name, whole = operation.name, not operation.mutates
    if name in ("zero_", "zeros_like") or (name == "fill_" and _is_zero(args[1])):
        return Region("all", target, whole, [])
    if name in ("mul_", "mul"):
        by = args[1]
        if isinstance(by, (int, float)):
            return Region("all", target, whole, []) if by == 0 else None
        mask = isinstance(by, torch.Tensor) and by.ndim > 0 and not by.requires_grad and by.numel() <= _KEYS
        return Region("factor", target, whole, [by]) if mask else None
    if not _is_zero(args[-1] if name != "index_put_" else args[2]):
        return None
    if name in ("masked_fill_", "masked_fill"):
        return Region("mask", target, whole, [args[1]]) if args[1].numel() <= _KEYS else None
    if name == "index_fill_":
        return Region("dimension", target, whole, [args[2]], int(args[1]))
    few = name == "index_put_" and sum(k.numel() for k in args[1] if isinstance(k, torch.Tensor)) <= _KEYS
    return Region("index", target, whole, list(args[1])) if few else None


def _copied(key: Any) -> Any:
    return key.detach().clone() if isinstance(key, torch.Tensor) else key


def _is_zero(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.device.type == "cpu" and float(value) == 0.0
    return isinstance(value, (int, float)) and value == 0
