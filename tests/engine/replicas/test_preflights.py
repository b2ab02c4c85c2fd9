"""Preflight on every replica: one row a rank, and what makes one update of them impossible."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.replicas.company import Company, Failure

CASE = "tests.engine.replicas.preflights:preflight"


def row(result: Any, check: str = "replicas") -> dict[str, Any]:
    return next(row for row in result["json"]["rows"] if row["check"] == check)  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "group"])
def test_one_row_a_rank(company: Company, wrapped: bool, precision: str) -> None:
    replicas = "none" if wrapped else "group"
    results = company.run(CASE, 2, wrapped=wrapped, precision=precision, replicas=replicas)
    for result in results:
        assert result["passed"], result["text"]
        ranks = result["json"]["ranks"]
        assert [(r["rank"], r["passed"]) for r in ranks] == [(0, True), (1, True)]
        assert [r["numbers"]["weight"] for r in ranks] == [5.0, 9.0]
        assert [r["numbers"]["micro_batches"] for r in ranks] == [2, 3]
        assert "W = 14 (5, 9)" in row(result)["seen"]
        assert "rank 0   passed" in result["text"]
        assert "rank 1   passed" in result["text"]
        exchange = row(result, "exchange")
        assert exchange["verdict"] == "pass"
        assert (exchange["numbers"]["D"], exchange["numbers"]["R"]) == (2, 2)
    assert len({str(row(result, "exchange")) for result in results}) == 1


def test_ranks_that_cannot_make_one_update(company: Company) -> None:
    for result in company.run(CASE, 2, apart=False):
        assert not result["passed"]
        assert "5 of 5 examples are on more than one rank" in row(result)["seen"]
    for result in company.run(CASE, 2, alike=False):
        assert not result["passed"]
        assert "rank 1 are not those of rank 0" in row(result)["seen"]


def test_a_rank_that_raises_leaves_nobody_waiting(company: Company) -> None:
    told, raised = company.attempt(CASE, 2, raises=True)
    assert not told["passed"]
    assert told["json"]["ranks"][1]["failed"] == ["ValueError: no such file"]
    assert isinstance(raised, Failure)
    assert raised.kind == "ValueError"


def test_gradients_that_are_exchanged_wrongly_or_not_at_all(company: Company) -> None:
    for result in company.run(CASE, 2, halves=True):
        assert not result["passed"]
        assert row(result, "exchange")["verdict"] == "fail"
        assert row(result, "exchange")["numbers"]["error"] > 0.1
        assert "communication hook" in row(result, "exchange")["fix"]
    for result in company.run(CASE, 2, wrapped=False):
        assert row(result, "exchange")["verdict"] == "fail"
        assert "each rank would train a model of its own" in row(result, "exchange")["seen"]
    for result in company.run(CASE, 2, wrapped=False, replicas="one", apart=False):
        assert result["passed"]  # every process trains for itself, and said so
        assert result["json"]["ranks"] == []
