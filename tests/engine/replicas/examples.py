"""Cases of examples that more than one replica has."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from tests.engine.replicas.layouts import tower
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from halfstep.engine.manager import MixedPrecisionManager
from halfstep.errors import HalfstepError

Rows = list[tuple[list[Any], Tensor]]


def _train(manager: MixedPrecisionManager, model: Any, loader: Any, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for group in manager.groups(loader, 2, weight=lambda batch: len(batch[1]), model=model, **options):
        for _, x in group:
            manager.backward(F.mse_loss(model(x), x))
        manager.step(model, optimizer)


def _told(manager: MixedPrecisionManager, caught: list[Any], error: str = "") -> dict[str, Any]:
    report = manager.report()
    return {
        "examples": report["examples"],
        "notes": [note["message"] for note in report["notes"] if note["note"] == "examples"],
        "warnings": [str(w.message) for w in caught if "halfstep" in str(w.message)],
        "error": error,
    }


def named(rank: int, world: int, epochs: list[list[list[list[Any]]]], policy: str) -> dict[str, Any]:
    """``epochs[e][rank]``: micro-batches, each a list of ids."""
    manager = MixedPrecisionManager(precision="fp32", on_duplicate=policy)
    model = DistributedDataParallel(tower())
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for epoch in epochs:
                loader: Rows = [(ids, torch.ones(len(ids), 4)) for ids in epoch[rank]]
                _train(manager, model, loader, ids=lambda batch: batch[0])
        except HalfstepError as seen:
            error = str(seen)
    return _told(manager, caught, error)


def sampled(rank: int, world: int, size: int, dealt: bool, shuffle: bool = True, epochs: int = 2) -> dict[str, Any]:
    """A DataLoader whose sampler tells the ids; not ``dealt``: every replica reads all of it in order."""
    dataset = TensorDataset(torch.arange(size), torch.randn(size, 4, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(dataset, shuffle=shuffle) if dealt else None
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    manager = MixedPrecisionManager(precision="fp32")
    model = DistributedDataParallel(tower())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            _train(manager, model, loader)
    return _told(manager, caught)
