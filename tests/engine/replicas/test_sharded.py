"""Sharded parameters (FSDP2, HSDP): the same updates, norms over all shards, every rank in every collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.replicas.cases import Shared
from tests.engine.replicas.company import Company, Failure
from tests.engine.replicas.test_exact import data, net
from tests.engine.replicas.twin import assert_same
from tests.engine.runs import bad, batch, dead

pytestmark = pytest.mark.processes


def sharded(micro_batches: list[list[Any]], **changes: Any) -> Shared:
    return Shared(changes.pop("net", None) or net(), micro_batches, wrap="fsdp", **changes)


@pytest.mark.parametrize("flow", ["ahead", "graph", "along", "masked", "flat"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_fsdp(company: Company, world: int, flow: str) -> None:
    policy = {"replicas": "model"} if flow == "flat" else {}
    results = assert_same(company, sharded(data(1, *[4] * world), flow=flow, policy=policy))
    record = results[0]["record"]["batch"]
    assert (record["D"], record["R"], record["backend"]) == (world, world, "fully_shard")


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (2, 1)])
def test_hsdp(company: Company, shape: tuple[int, int]) -> None:
    """Replicas are all members of the mesh, sharded and replicated dimension."""
    world = shape[0] * shape[1]
    results = assert_same(company, sharded(data(2, *[3] * world), options={"mesh": shape}))
    assert results[-1]["record"]["batch"]["D"] == world


def test_a_divide_factor_is_read(company: Company) -> None:
    """Where the backend sums, local sums are divided by W alone."""
    results = assert_same(company, sharded(data(3, 3, 2), options={"factor": 1.0}))
    assert (results[0]["record"]["batch"]["D"], results[0]["record"]["batch"]["R"]) == (2, 1)


@pytest.mark.parametrize("flow", ["ahead", "graph", "along", "masked"])
def test_a_replica_that_runs_dry_keeps_the_others_company(company: Company, flow: str) -> None:
    """It goes through its last micro-batch again, at weight 0: forward and backward are collectives."""
    results = assert_same(company, sharded(data(4, 5, 3, 2), flow=flow))
    assert [row["micro_batches"] for row in results[1]["rows"]] == [2, 1, 0]


def test_no_micro_batch_from_the_start(company: Company) -> None:
    outcomes = company.attempt("train", 2, run=sharded([data(5, 2)[0], []]))
    assert all(
        isinstance(outcome, Failure) and "no micro-batch to go through" in outcome.message for outcome in outcomes
    )


@pytest.mark.parametrize("flow", ["ahead", "graph", "along", "masked", "flat"])
def test_supervises_nothing(company: Company, flow: str) -> None:
    epochs = [[batch(1), dead(2), dead(3), dead(4)], [batch(5), batch(6), dead(7), batch(8)]]
    policy = {"replicas": "model"} if flow == "flat" else {}
    assert_same(company, sharded(epochs, flow=flow, policy=policy))


@pytest.mark.parametrize("flow", ["ahead", "graph"])
def test_empty_for_all(company: Company, flow: str) -> None:
    epochs = [[dead(1), dead(2), batch(3)], [dead(5), dead(6), batch(7)]]
    results = assert_same(company, sharded(epochs, flow=flow))
    assert [row["outcome"] for row in results[0]["rows"]] == ["empty", "applied"]


def test_not_finite_in_one_shard(company: Company) -> None:
    epochs = [[batch(1), batch(2), batch(3)], [batch(4), bad(5), batch(6)]]
    results = assert_same(company, sharded(epochs))
    for result in results:
        assert [row["outcome"] for row in result["rows"]] == ["skipped", "applied"]
        notes = [n["message"] for n in result["record"]["notes"] if n["note"] == "not finite"]
        assert len(notes) == 1
        assert "micro-batch 2 on rank 1" in notes[0]


@pytest.mark.parametrize("fused", [True, False])
def test_adam_on_shards(company: Company, fused: bool) -> None:
    """Folded or not, the update of sharded parameters is that of whole ones under DistributedDataParallel."""
    optimizer = "adamw fused" if fused else "adamw"
    runs = [Shared(net(), data(6, 3, 3), wrap=wrap, optimizer=optimizer) for wrap in ("ddp", "fsdp")]
    ours, theirs = (company.run("train", 2, run=run)[0]["parameters"] for run in runs)
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_layer_norms_are_of_whole_parameters(company: Company) -> None:
    results = [company.run("train", 2, run=Shared(net(), data(7, 2, 2), wrap=wrap))[0] for wrap in ("ddp", "fsdp")]
    ours, theirs = (result["rows"][0]["layer_norms"] for result in results)
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_half_precision_of_fully_shard(company: Company) -> None:
    """Its own policy: parameters gathered in BF16, gradients reduced in FP32. The record tells."""
    results = assert_same(company, sharded(data(8, 3, 3), options={"policy": "bf16"}), tolerance=3e-2)
    assert results[0]["record"]["batch"]["sharding"] == {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
