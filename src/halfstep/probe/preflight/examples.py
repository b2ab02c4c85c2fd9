"""Which examples micro-batches hold: a fingerprint of each, so that they can be held against each other."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.group import examples_of
from halfstep.probe.whole import mapped


def fingerprints(batch: Any) -> list[str]:
    """One a row of the batch's tensors, of all that it holds there; empty where its examples cannot be told apart."""
    count = examples_of(batch)
    if not count:
        return []
    rows = [hashlib.blake2b(digest_size=12) for _ in range(count)]
    used = False

    def add(tensor: Tensor) -> Tensor:
        nonlocal used
        if tensor.dim() and tensor.shape[0] == count and tensor.layout == torch.strided:
            used = True
            flat = tensor.detach().cpu().contiguous()
            plain = flat.reshape(count, -1).view(torch.uint8) if flat.numel() else flat.reshape(count, 0)
            for row, part in zip(rows, plain, strict=True):
                row.update(str(tuple(flat.shape[1:])).encode())
                row.update(part.numpy().tobytes())
        return tensor

    mapped(batch, add)
    return [row.hexdigest() for row in rows] if used else []


def nonfinite(batches: Sequence[Any]) -> list[int]:
    """Positions of the micro-batches that hold non-finite values."""
    positions: list[int] = []
    for position, batch in enumerate(batches):
        bad: list[bool] = []

        def look(tensor: Tensor, bad: list[bool] = bad) -> Tensor:
            if tensor.is_floating_point() and tensor.numel():
                bad.append(not bool(tensor.isfinite().all()))
            return tensor

        mapped(batch, look)
        if any(bad):
            positions.append(position)
    return positions


def repeated(batches: Sequence[Sequence[Any]]) -> list[tuple[Any, list[int]]]:
    """What occurs more than once: (fingerprint or id, positions of the micro-batches that hold it)."""
    places: dict[Any, list[int]] = {}
    for position, prints in enumerate(batches):
        for entry in prints:
            places.setdefault(entry, []).append(position)
    return [(entry, where) for entry, where in places.items() if len(where) > 1]


def same(parts: Sequence[Sequence[Any]], whole: Sequence[Any]) -> bool:
    """Whether the big batch holds just these examples."""
    return Counter(entry for part in parts for entry in part) == Counter(whole)
