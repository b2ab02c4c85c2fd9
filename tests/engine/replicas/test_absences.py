"""A rank that ends, or never comes: the others say so in time, unchanged, with a journal of all that was applied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.engine.replicas.company import Company

from halfstep.engine.replicas.collectives import lost

pytestmark = pytest.mark.processes


def test_errors_of_ones_own_are_no_lost_ranks() -> None:
    for words in (
        "NCCL error: unhandled cuda error",
        "CUDA out of memory",
        "mat1 and mat2 shapes cannot be multiplied",
    ):
        assert lost(RuntimeError(words), "gradients") is None
        assert lost(dist.DistBackendError(words), "gradients") is None or "mat1" in words
    assert lost(ValueError("timed out"), "gradients") is None
    assert lost(dist.DistBackendError("NCCL: remote process exited"), "gradients") is not None


@pytest.mark.parametrize(
    ("where", "how", "late"),
    [("group", "hangs", False), ("backward", "hangs", False), ("group", "dies", False), ("group", "dies", True)],
)
def test_the_others_end_in_time_with_a_clear_error(tmp_path: Path, where: str, how: str, late: bool) -> None:
    company = Company(2)
    try:
        told, missing = company.attempt(
            "tests.engine.replicas.absences:absent", 2, where=where, how=how, folder=tmp_path, late=late
        )
    finally:
        company.close()
    assert missing is None if how == "dies" else missing.message == "was missed"
    assert told["kind"] == "ReplicaLostError"
    assert "rank 0 of 2 was left alone while" in told["message"]
    assert ("gradients" if where == "backward" else "the counts of a group") in told["message"]
    assert "last checkpoint" in told["message"]
    assert told["cause"] == "RuntimeError"
    assert told["unchanged"]
    for name in ("journal.jsonl",) if late else ("journal.jsonl", "journal-rank1.jsonl"):  # the killed rank's too
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [(row["attempted_updates"], row["outcome"]) for row in rows] == [(1, "applied")]
