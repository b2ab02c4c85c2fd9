"""Law 8 on replicas: saved by two processes, continued by two new ones bit for bit, and by one within law 7."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.engine import restarts
from tests.engine.restarts import END, KINDS

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.processes
def test_two_new_processes_continue_bit_for_bit_and_one_within_law_7(tmp_path: Path) -> None:
    for verb in ("whole", "again"):
        done = torchrun("-m", "tests.engine.restarts", verb, tmp_path)
        assert done.returncode == 0, done.stderr
    for kind in KINDS:
        for rank in range(2):
            whole, again = (torch.load(tmp_path / f"{verb}, {kind}, {rank}") for verb in ("whole", "again"))
            assert again["rows"] == whole["rows"], (kind, rank)
            assert again["counters"] == whole["counters"], (kind, rank)
            for p, q in zip(whole["parameters"], again["parameters"], strict=True):
                assert torch.equal(p, q), (kind, rank)
    ranks = [torch.load(tmp_path / f"whole, {KINDS[0]}, {rank}") for rank in range(2)]
    assert ranks[0]["counters"]["skipped"] > 0  # the loss scale had moved
    assert ranks[0]["rows"] != ranks[1]["rows"]  # each has losses of its own
    for kind in KINDS[1:]:  # one process, A twice as large: the same examples in every update
        whole = torch.load(tmp_path / f"whole, {kind}, 0")
        run = restarts.build(kind)
        restarts.load(run, kind, tmp_path / kind)
        single = restarts.result(run, restarts.train(run))
        assert (single["batch"]["D"], whole["batch"]["D"]) == (1, 2)
        assert single["counters"]["attempted"] == END
        for p, q in zip(whole["parameters"], single["parameters"], strict=True):
            assert float((p - q).norm() / p.norm()) < 1e-5, kind
