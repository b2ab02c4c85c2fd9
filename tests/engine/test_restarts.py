"""Law 8 on replicas: saved by two processes, continued by two new ones bit for bit, and by one within law 7.

On the way one of the new ones is killed; torchrun starts both again, and they go on from the checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import restarts
from tests.engine.restarts import END, GROWN, KILLED, KINDS, OWN, STOP

ROOT = Path(__file__).parents[2]


def torchrun(verb: str, folder: Path) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "tests.engine.restarts", verb, str(folder)],
        cwd=ROOT,
        # A store of its own for each start: gloo finds the addresses of the processes before in a shared one.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads what two saved: meant
def test_two_new_processes_continue_bit_for_bit_and_one_within_law_7(tmp_path: Path) -> None:
    grown = restarts.build(GROWN)
    rows = restarts.train(grown, lambda update: update == STOP and restarts.save(grown, GROWN, tmp_path / GROWN))
    for verb in ("whole", "again"):
        done = torchrun(verb, tmp_path)
        assert done.returncode == 0, done.stderr
    assert "(SIGKILL)" in done.stderr or "exitcode: -9" in done.stderr
    for kind in KINDS:
        for rank in range(2):
            whole, again = (torch.load(tmp_path / f"{verb}, {kind}, {rank}") for verb in ("whole", "again"))
            assert again["rows"] == whole["rows"], (kind, rank)
            assert again["counters"] == whole["counters"], (kind, rank)
            for p, q in zip(whole["parameters"], again["parameters"], strict=True):
                assert torch.equal(p, q), (kind, rank)
    ranks = [torch.load(tmp_path / f"whole, {OWN}, {rank}") for rank in range(2)]
    assert ranks[0]["counters"]["skipped"] > 0  # the loss scale had moved
    assert ranks[0]["rows"] != ranks[1]["rows"]  # each has losses of its own
    for name in ("journal.jsonl", "journal-rank1.jsonl"):  # whole up to the last update before the kill
        lines = (tmp_path / f"record of again, {OWN}" / name).read_text().splitlines()
        numbers = [(row["kind"], row["attempted_updates"]) for row in map(json.loads, lines) if row["kind"] != "note"]
        resumed = [("resumed", STOP)]
        first, last = ([("update", update) for update in range(STOP + 1, end + 1)] for end in (KILLED, END))
        assert numbers == resumed + first + resumed + last
    for kind in KINDS[1:]:  # one process, A twice as large: the same examples in every update
        whole = torch.load(tmp_path / f"whole, {kind}, 0")
        run = restarts.build(kind)
        restarts.load(run, kind, tmp_path / kind)
        assert_within_law_7(restarts.result(run, restarts.train(run)), whole, kind)
    assert_within_law_7(restarts.result(grown, rows), torch.load(tmp_path / f"again, {GROWN}, 0"), GROWN)


def assert_within_law_7(single: dict[str, Any], double: dict[str, Any], kind: str) -> None:
    assert (single["batch"]["D"], double["batch"]["D"]) == (1, 2)
    for count in ("attempted", "examples", "weight"):
        assert single["counters"][count] == double["counters"][count], (kind, count)
    for p, q in zip(double["parameters"], single["parameters"], strict=True):
        assert float((p - q).norm() / p.norm()) < 1e-5, kind
