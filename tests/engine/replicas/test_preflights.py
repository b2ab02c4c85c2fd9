"""Preflight on every replica: one row a rank, and what makes one update of them impossible."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.replicas.company import Company, Failure

CASE = "tests.engine.replicas.preflights:preflight"


def row(result: Any) -> dict[str, Any]:
    return next(row for row in result["json"]["rows"] if row["check"] == "replicas")  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrapped", [True, False], ids=["ddp", "plain"])
def test_one_row_a_rank(company: Company, wrapped: bool) -> None:
    results = company.run(CASE, 2, alike=True, apart=True, wrapped=wrapped)
    for result in results:
        assert result["passed"], result["text"]
        ranks = result["json"]["ranks"]
        assert [(r["rank"], r["passed"]) for r in ranks] == [(0, True), (1, True)]
        assert [r["numbers"]["weight"] for r in ranks] == [5.0, 9.0]
        assert [r["numbers"]["micro_batches"] for r in ranks] == [2, 3]
        assert "W = 14 (5, 9)" in row(result)["seen"]
        assert "rank 0   passed" in result["text"]
        assert "rank 1   passed" in result["text"]


def test_ranks_that_cannot_make_one_update(company: Company) -> None:
    for result in company.run(CASE, 2, alike=True, apart=False, wrapped=True):
        assert not result["passed"]
        assert "5 of 5 examples are on more than one rank" in row(result)["seen"]
    for result in company.run(CASE, 2, alike=False, apart=True, wrapped=True):
        assert not result["passed"]
        assert "rank 1 are not those of rank 0" in row(result)["seen"]


def test_a_rank_that_raises_leaves_nobody_waiting(company: Company) -> None:
    told, raised = company.attempt(CASE, 2, alike=True, apart=True, wrapped=True, raises=True)
    assert not told["passed"]
    assert told["json"]["ranks"][1]["failed"] == ["ValueError: no such file"]
    assert isinstance(raised, Failure)
    assert raised.kind == "ValueError"
