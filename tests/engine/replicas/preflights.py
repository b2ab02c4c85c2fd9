"""Preflights on every rank of a group: see ``test_preflights``."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import MixedPrecisionManager


def preflight(rank: int, world: int, *, alike: bool, apart: bool, wrapped: bool, raises: bool = False) -> Any:
    """What one rank is told. ``alike``: the same parameters everywhere; ``apart``: other examples on every rank."""
    torch.manual_seed(0 if alike else rank)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(7 + (rank if apart else 0))
    batches = [
        (torch.randn(2 + k, 4, generator=generator), torch.randint(3, (2 + k,), generator=generator))
        for k in range(2 + (rank if apart else 0))
    ]
    model: nn.Module = DistributedDataParallel(inner) if wrapped else inner
    if not alike:  # DDP makes them alike at the start
        with torch.no_grad():
            next(inner.parameters()).add_(rank)
    manager = MixedPrecisionManager(precision="bf16", device="cpu")
    before = [p.detach().clone() for p in model.parameters()]

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if raises and rank == 1:
            raise ValueError("no such file")
        return F.cross_entropy(module(batch[0]).float(), batch[1])

    result = manager.preflight(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batches)
    assert all(map(torch.equal, model.parameters(), before))
    assert manager.report()["counters"]["attempted"] == 0
    return {"passed": result.passed, "text": str(result), "json": json.loads(json.dumps(result.as_dict()))}
