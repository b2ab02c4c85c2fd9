"""Replicas that differ: in micro-batches, in what is supervised, in what is finite. Nothing hangs, all stay exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.replicas.cases import Shared, Synced
from tests.engine.replicas.company import Company
from tests.engine.replicas.test_exact import data, net
from tests.engine.replicas.twin import assert_same
from tests.engine.runs import bad, batch, dead

pytestmark = pytest.mark.processes

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]
FLOWS = ["ahead", "graph", "along", "masked"]


def run_with(options: dict[str, Any], micro_batches: list[list[Any]], **changes: Any) -> Shared:
    return Shared(
        net(idle=bool(options) and "gradient_as_bucket_view" not in options), micro_batches, options=options, **changes
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o), "plain"))
@pytest.mark.parametrize("flow", FLOWS)
def test_other_numbers_of_micro_batches(company: Company, flow: str, options: dict[str, Any]) -> None:
    """Replica 1 runs dry in the second group, replica 2 in the first; a later epoch begins with all of them."""
    assert_same(company, run_with(options, data(2, 5, 3, 1), flow=flow, epochs=2))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o), "plain"))
@pytest.mark.parametrize("flow", [*FLOWS, "flat"])
def test_last_contribution_supervises_nothing(company: Company, flow: str, options: dict[str, Any]) -> None:
    """Its features are NaN; the other replica's reducer waits for it."""
    epochs = [[batch(1), dead(2), batch(3), batch(4)], [batch(5), batch(6), batch(7), dead(8)]]
    policy = {"replicas": "model"} if flow == "flat" else {}
    assert_same(company, run_with(options, epochs, flow=flow, policy=policy))


@pytest.mark.parametrize("flow", [*FLOWS, "flat"])
def test_a_replica_that_supervises_nothing(company: Company, flow: str) -> None:
    epochs = [[dead(1), dead(2), dead(3), dead(4), batch(9)], [batch(5), batch(6), dead(7), dead(8), batch(10)]]
    policy = {"replicas": "model"} if flow == "flat" else {}
    results = assert_same(company, run_with({}, epochs, flow=flow, policy=policy, epochs=2))
    outcomes = [row["outcome"] for row in results[0]["rows"]]
    assert outcomes == ["applied", "empty", "applied"] * 2


def test_an_epoch_without_data_on_one_replica(company: Company) -> None:
    assert_same(company, Shared(net(), [[], *data(4, 3)]))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_group_is_decided_for_all(company: Company, drop_last: bool) -> None:
    results = assert_same(company, Shared(net(), data(5, 5, 4), drop_last=drop_last))
    assert len(results[0]["rows"]) == (2 if drop_last else 3)
    last = results[0]["record"]["last_group"]
    assert (last["kept"], last["dropped"]) == ((0, 1) if drop_last else (1, 0))


@pytest.mark.parametrize("flow", ["ahead", "graph"])
@pytest.mark.parametrize("place", [0, 1])
def test_not_finite_on_one_replica(company: Company, flow: str, place: int) -> None:
    """All skip, whichever saw it; the record of each names rank, micro-batch and parameters."""
    epochs = [[batch(k) for k in range(4)], [batch(10 + k) for k in range(4)]]
    epochs[1][2 + place] = bad(3)
    results = assert_same(company, Shared(net(), epochs, flow=flow))
    assert [row["outcome"] for row in results[0]["rows"]] == ["applied", "skipped"]
    for result in results:
        notes = [n["message"] for n in result["record"]["notes"] if n["note"] == "not finite"]
        assert len(notes) == 1
        assert f"micro-batch {place + 1} on rank 1" in notes[0]
        assert "first.weight" in notes[0]


@pytest.mark.parametrize("flow", ["ahead", "along", "flat"])
def test_several_terms(company: Company, flow: str) -> None:
    policy = {"replicas": "model"} if flow == "flat" else {}
    assert_same(company, run_with({}, data(6, 4, 3), flow=flow, terms=2, policy=policy) if flow != "flat" else
                run_with({}, data(6, 4, 4), flow=flow, terms=2, policy=policy))  # fmt: skip


@pytest.mark.parametrize("counts", [(4, 4), (4, 1)])
def test_buffers_are_sent_round_once_or_not_at_all(company: Company, counts: tuple[int, ...]) -> None:
    """Broadcast buffers are a collective of the forward: a replica that runs dry has none."""
    buffered = net()
    buffered.register_buffer("seen", torch.zeros(3))
    epochs = data(7, *counts)
    epochs[0][1] = dead(2)
    assert_same(company, Shared(buffered, epochs, epochs=2))


def test_double_precision(company: Company) -> None:
    assert_same(company, Shared(net().double(), data(8, 4, 2, 3)))


@pytest.mark.parametrize("flow", ["ahead", "masked"])
def test_a_model_that_nothing_wraps(company: Company, flow: str) -> None:
    """The engine averages gradients itself where it is told among whom."""
    assert_same(company, Shared(net(idle=True), data(9, 3, 5), flow=flow, wrap="none", policy={"replicas": "world"}))


@pytest.mark.parametrize("options", OPTIONS[:3], ids=lambda o: next(iter(o), "plain"))
@pytest.mark.parametrize("flow", FLOWS)
def test_layers_that_meet_in_every_forward(company: Company, flow: str, options: dict[str, Any]) -> None:
    """SyncBatchNorm: a replica that runs dry or supervises nothing comes by all the same."""
    torch.manual_seed(0)
    epochs = [[batch(1), dead(2), batch(3), batch(4), batch(5)], [dead(6), batch(7), dead(8)]]
    results = assert_same(company, Shared(Synced(), epochs, flow=flow, options=options))
    assert [row["micro_batches"] for row in results[1]["rows"]] == [2, 1, 0]
