"""Many replicas give the update of one process: against the FP64 twin that sees all their micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.replicas.cases import Shared, Slim
from tests.engine.replicas.company import Company
from tests.engine.replicas.twin import assert_same
from tests.engine.runs import Net, bad, batch, dead

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


@pytest.mark.parametrize("flow", ["ahead", "along", "graph"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_outcomes_that_are_known_late(company: Company, wrap: str, flow: str) -> None:
    """As on an accelerator: weights stay on the device, and who was not finite is told at the next update."""
    epochs = data(2, 8, 7)
    epochs[1][2] = bad(1)
    run = Shared(net(), epochs, flow=flow, wrap=wrap, late=True)
    results = assert_same(company, run)
    assert [row["outcome"] for row in results[0]["rows"]] == ["applied", "skipped", "applied", "applied"]
    notes = [n["message"] for n in results[0]["record"]["notes"] if n["note"] == "not finite"]
    assert len(notes) == 1
    assert "micro-batch 1 on rank 1" in notes[0]


@pytest.mark.parametrize("flow", ["ahead", "graph"])
def test_a_model_that_groups_is_not_told(company: Company, flow: str) -> None:
    """Its first group exchanges in every backward, which changes nothing; from the update on it is known."""
    assert_same(company, Shared(net(), data(4, 6, 6), flow=flow, policy={"replicas": "world"}, named=False))


def test_compiled(company: Company) -> None:
    """Its forward is not seen: a replica that turns out to weigh nothing could not take part in its backward."""
    epochs = data(5, 4, 4)
    epochs[0][3] = dead(1)
    for flow in ("ahead", "graph"):
        assert_same(company, Shared(net(), epochs, flow=flow, wrap="compiled"))


@pytest.mark.parametrize("flow", ["ahead", "graph"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_folded_updates_that_are_known_late(company: Company, wrap: str, flow: str) -> None:
    """Nothing is waited for in ``step``, the outcome included: what waiting gives. The last update is
    skipped, and none comes after it in which replicas could tell each other: each tells what it saw."""
    epochs = data(2, 8, 8)
    epochs[1][2], epochs[1][7] = bad(1), bad(2)
    runs = [
        company.run("train", 2, run=Shared(net(), epochs, flow=flow, wrap=wrap, optimizer="adamw fused", late=late))
        for late in (False, True)
    ]
    for early, late in zip(*runs, strict=True):
        assert [row["outcome"] for row in late["rows"]] == ["applied", "skipped", "applied", "skipped"]
        for ours, theirs in zip(late["parameters"], early["parameters"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    told = [[n["message"] for n in r["record"]["notes"] if n["note"] == "not finite"] for r in runs[1]]
    assert [len(messages) for messages in told] == [2, 2]
    assert all("micro-batch 1 on rank 1" in messages[0] for messages in told)
    assert "every loss was finite on rank 0" in told[0][1]
    assert "micro-batch 2 on rank 1" in told[1][1]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_loss_scale_is_one_for_all(company: Company, wrap: str) -> None:
    """An overflow on one replica halves the scale on every one."""
    wide = Slim(3, 16)
    epochs = data(3, 6, 5)
    epochs[1][0] = bad(1)
    policy = {"precision": "fp16", "init_scale": 2.0**10}
    results = assert_same(company, Shared(wide, epochs, wrap=wrap, policy=policy), tolerance=2e-2)
    assert [result["scale"] for result in results] == [2.0**9, 2.0**9]
    assert [row["scale"] for row in results[0]["rows"]] == [2.0**10, 2.0**9, 2.0**9]


def test_plain_contributions_are_the_mean_of_replicas(company: Company) -> None:
    """Without weights the loss is taken as it is scaled, and the backend averages it: the shape of old trainers."""
    epochs = [
        [batch(k, live=1.0)] for k in range(2)
    ]  # one micro-batch each, of the same size: the mean of means is right
    results = assert_same(company, Shared(net(), epochs, size=1, flow="plain"))
    assert results[0]["rows"][0]["weight"] is None
