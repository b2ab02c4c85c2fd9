"""Preflights on every rank of a group: see ``test_preflights``."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import MixedPrecisionManager


def _halved(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over two ranks, halved once more."""
    work = dist.all_reduce(bucket.buffer().div_(4), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


# DDP reads the annotations themselves, not their names.
_halved.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def preflight(
    rank: int,
    world: int,
    *,
    alike: bool = True,
    apart: bool = True,
    wrapped: bool = True,
    raises: bool = False,
    halves: bool = False,
    precision: str = "bf16",
    replicas: str = "none",
) -> Any:
    """What one rank is told. ``alike``: the same parameters everywhere; ``apart``: other examples on every rank.

    ``halves``: a communication hook that halves what is exchanged; ``replicas``: "none", "one" or "group".
    """
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
    if halves:
        model.register_comm_hook(None, _halved)  # type: ignore[operator]
    given = {"none": None, "one": 1, "group": dist.group.WORLD}[replicas]
    manager = MixedPrecisionManager(precision=precision, device="cpu", replicas=given)
    before = [p.detach().clone() for p in model.parameters()]

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if raises and rank == 1:
            raise ValueError("no such file")
        return F.cross_entropy(module(batch[0]).float(), batch[1])

    result = manager.preflight(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batches)
    assert all(map(torch.equal, model.parameters(), before))
    assert manager.report()["counters"]["attempted"] == 0
    return {"passed": result.passed, "text": str(result), "json": json.loads(json.dumps(result.as_dict()))}
