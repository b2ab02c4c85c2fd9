"""Many replicas give the update of one process: against the FP64 twin that sees all their micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.replicas.cases import Shared, Slim
from tests.engine.replicas.company import Company
from tests.engine.replicas.twin import assert_same
from tests.engine.runs import Net, batch

pytestmark = pytest.mark.processes


def data(seed: int, *counts: int, live: float = 0.6) -> list[list[Any]]:
    """So many micro-batches on each replica, ragged."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 4, (len(counts), max(counts)), generator=generator)
    return [
        [batch(1000 * seed + 10 * r + k, m=int(sizes[r, k]), live=live) for k in range(count)]
        for r, count in enumerate(counts)
    ]


def net(seed: int = 0, *, idle: bool = False) -> Net:
    torch.manual_seed(seed)
    return Net(3, 5, 4) if idle else Slim()


def test_company(company: Company) -> None:
    assert company.run("hello", 3) == [3, 3, 3]


@pytest.mark.parametrize("flow", ["ahead", "graph", "along", "masked", "flat"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ddp(company: Company, world: int, flow: str) -> None:
    run = Shared(net(), data(1, *[4] * world), flow=flow)
    if flow == "flat":
        run.policy["replicas"] = "model"
    assert_same(company, run)
