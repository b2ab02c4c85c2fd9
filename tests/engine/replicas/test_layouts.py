"""Who counts as a replica on a mesh, and what is refused or called unverified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.replicas.company import Company
from tests.engine.replicas.layouts import alone

pytestmark = pytest.mark.processes

CASES = "tests.engine.replicas.layouts"


def assert_alike(results: list[dict[str, Any]], replicas: int) -> None:
    """Parameters, norms and weights are those of one process with all examples."""
    expected = alone(replicas)
    for result in results:
        for row, other in zip(result["rows"], expected["rows"], strict=True):
            assert row["weight"] == other["weight"]
            assert row["examples"] == other["examples"]
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            assert row["layer_norms"] == pytest.approx(other["layer_norms"], rel=1e-4, abs=1e-6)
        for ours, theirs in zip(result["parameters"], expected["parameters"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_tensor_parallel_ranks_are_one_replica(company: Company) -> None:
    results = company.run(f"{CASES}:tensor_parallel", 2)
    assert_alike(results, 1)
    assert (results[0]["batch"]["D"], results[0]["batch"]["R"]) == (1, 1)
    assert "tensor parallel" in results[0]["batch"]["inferred"]


def test_tensor_parallel_inside_replicas(company: Company) -> None:
    results = company.run(f"{CASES}:two_dimensions", 4)
    assert_alike(results, 2)
    assert (results[0]["batch"]["D"], results[0]["batch"]["R"]) == (2, 2)
    assert results[0]["batch"]["unverified"] == []


def test_replicas_and_averaging_ranks_are_told_apart(company: Company) -> None:
    results = company.run(f"{CASES}:context_parallel", 4)
    assert_alike(results, 4)
    assert (results[3]["batch"]["D"], results[3]["batch"]["R"]) == (2, 4)


def test_ranks_that_are_neither_are_told(company: Company) -> None:
    results = company.run(f"{CASES}:declared", 4)
    assert_alike(results, 2)
    assert results[0]["batch"]["D"] == 2
    assert any("2 of 4 ranks are neither replicas" in note for note in results[0]["batch"]["unverified"])


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_what_was_discarded_leaves_nothing(company: Company, wrap: str) -> None:
    expected = alone(2, starts=(2,))
    for result in company.run(f"{CASES}:dropped", 2, wrap=wrap):
        assert result["rows"][0]["grad_norm"] == pytest.approx(expected["rows"][0]["grad_norm"], rel=1e-4)
        for ours, theirs in zip(result["parameters"], expected["parameters"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_two_models_side_by_side(company: Company) -> None:
    """A contribution of weight 0 to one of them takes no part in the other's exchange."""
    expected = alone(2, bare={1: 1})
    for results in company.run(f"{CASES}:two_models", 2):
        for result in results:
            for row, other in zip(result["rows"], expected["rows"], strict=True):
                assert (row["weight"], row["outcome"]) == (other["weight"], "applied")
                assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            for ours, theirs in zip(result["parameters"], expected["parameters"], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_gradients_are_exchanged_once_an_update(company: Company, wrap: str, weighed: bool) -> None:
    """Two groups of two micro-batches, one bucket. Rows: one a group and one at the end; one more a group, and one in
    the run, where weights come with the losses. Shards: one more for the norms."""
    counts = company.run(f"{CASES}:traffic", 2, wrap=wrap, weighed=weighed)[0]
    assert counts == {"gradients": 2, "rows": 3 if weighed else 6, "norms": 2 * (wrap == "fsdp")}


@pytest.mark.parametrize("by", [1, 2, 3])
def test_a_loss_divided_by_the_number_of_replicas_is_told(company: Company, by: int) -> None:
    told = company.run(f"{CASES}:divided", 2, by=by)[0]
    assert told["notes"] == (["a share of 1/D"] if by == 2 else [])
    assert told["verdict"] == ("unverified" if by == 2 else "verified")


@pytest.mark.parametrize("kind", ["none", "mean", "sum"])
def test_communication_hooks(company: Company, kind: str) -> None:
    said = company.run(f"{CASES}:hooked", 2, kind=kind)[0]
    assert len(said) == (kind == "sum")
    assert all("_sum" in note for note in said)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bare", "each rank would train a model of its own"),
        ("unknown", "before it is known who the replicas are"),
        ("flat", "a weight was given outside manager.groups"),
        ("data parallel", "DataParallel"),
        ("part", "4 trainable parameters are in no wrapper"),
        ("policy", "different policies"),
        ("kernels", "no fused SGD for sharded parameters"),
        ("seeds", "parameters differ between the replicas"),
        ("not finite", "the gradient of attempted update 1 is not finite"),
        ("last", "another reduction or drop_last"),
        ("size", "groups of different sizes: 2 on rank 0, 3 on rank 1"),
        ("too many", "replicas was given 2 ranks"),
        ("bypassed", "have not been exchanged"),
        ("alone in ddp", "replicas=1, but the model is in DistributedDataParallel over ranks [0, 1]"),
        ("alone in fsdp", "replicas=1, but the model is in fully_shard over ranks [0, 1]"),
    ],
)
def test_refused(company: Company, what: str, words: str) -> None:
    for message in company.run(f"{CASES}:refused", 2, what=what):
        assert words in message
        assert "fix:" in message


def test_each_rank_may_train_a_model_of_its_own(company: Company) -> None:
    """``replicas=1``: in no wrapper, or in one over a single rank."""
    assert company.run(f"{CASES}:refused", 2, what="alone") == ["not refused"] * 2
