"""Several processes as one run: under torchrun, spawned and forked, ended well, by an exception or by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from halfstep.record.reader import files
from halfstep.report.replay import replay
from tests.doctor import diagnose

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and signals of POSIX")

# Each rank divides by its own count, then ends as asked; a worker of a loader draws the examples.
SCRIPT = """
import os, signal, sys, tempfile, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def train(rank, where, how):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(rank))
    loader = DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=6, num_workers=how == "well")
    for i, (a, b) in enumerate(loader):
        count = len(a) if rank == 0 else 2
        loss = F.cross_entropy(model(a[:count]), b[:count])  # the line
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i == 1 and rank == 1:
            if how == "raise":
                raise ValueError("rank 1 has had enough")
            if how == "kill":
                time.sleep(2.2)
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()
    print(f"rank {rank} ends with {total.item().hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    how = sys.argv[1]
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), "env://", how)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(train, (f"file://{folder}/ranks", how), 2, start_method=sys.argv[2])
"""
LINE = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "# the line" in text)
RULE = "mean-of-means-across-replicas"


@dataclass
class Done:
    code: int
    out: list[str]
    err: str


def start(words: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=240)
    return Done(process.returncode, sorted(out.splitlines()), err)


def run(*words: str) -> Done:
    return done(start(list(words)))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "train.py"
    path.write_text(SCRIPT)
    return path


def watched(script: Path, *words: str) -> tuple[Done, dict[str, Any]]:
    found = script.parent / f"{'-'.join(words)}.json"
    ended = run(sys.executable, "-m", "halfstep", "run", "--json", str(found), "--", str(script), *words)
    return ended, json.loads(found.read_text())


def says(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(f["rule"], f["line"]) for f in found["findings"] if f["severity"] != "info"]


def test_torchrun_gives_one_report_and_the_same_results(script: Path) -> None:
    record = script.parent / "record"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("-m", "halfstep", "run", "--record", str(record), "--json", str(script.parent / "torchrun.json"), "--")
    plain = run(*torchrun, str(script), "well")
    ended = run(*torchrun, *options, str(script), "well")
    assert (ended.code, ended.out) == (plain.code, plain.out)
    assert len(ended.out) == 2
    assert ended.err.count("halfstep ·") == 1
    found = json.loads((script.parent / "torchrun.json").read_text())
    assert found["exit"] == {"code": 0, "by": "script"}
    assert (found["summary"]["attempted"], found["summary"]["micro_batches"]) == (4, 4)
    assert says(found) == [(RULE, LINE)]
    assert found["findings"][0]["count"] == 4
    assert found["findings"][0]["evidence"]["elements"] == {"0": 6.0, "1": 2.0}
    # The record tells the same again, judged anew; the loader's workers left nothing in it.
    assert [p.name for p in files(record)] == ["events-rank0.jsonl.gz", "events-rank1.jsonl.gz"]
    again = replay(record)
    assert [(f.rule, f.count, f.message) for f in again.findings] == [
        (f["rule"], f["count"], f["message"]) for f in found["findings"]
    ]
    assert len(list(again.history.rows)) == 4


def test_spawned_processes_are_followed(script: Path) -> None:
    ended, found = watched(script, "well", "spawn")
    assert ended.code == 0
    assert len(ended.out) == 2
    assert says(found) == [(RULE, LINE)]
    assert found["summary"]["attempted"] == 4
    assert found["summary"]["judged"]["not_judged"] == []


def test_a_rank_that_raises_ends_the_run_as_without_us(script: Path) -> None:
    plain = run(sys.executable, str(script), "raise", "fork")
    ended, found = watched(script, "raise", "fork")
    assert (ended.code, ended.out) == (plain.code, plain.out)
    assert ended.code == 1
    own = ended.err[: ended.err.index("halfstep ·")]
    assert traceback_of(own) == traceback_of(plain.err)
    assert (RULE, LINE) in says(found)
    assert found["summary"]["attempted"] == 2


def traceback_of(text: str) -> list[str]:
    """From the child's traceback on."""
    return [line for line in text[text.index("-- Process 1") :].splitlines() if line.strip()]


def test_a_killed_rank_is_judged_by_what_its_file_holds(script: Path) -> None:
    ended, found = watched(script, "kill", "fork")
    assert ended.code == 1
    assert "terminated with signal SIGKILL" in ended.err
    assert says(found)[0] == (RULE, LINE)
    assert "rank 1 after its record ends, cut short" in found["summary"]["judged"]["not_judged"]


def test_sigterm_ends_a_rank_that_waits_in_a_library(tmp_path: Path) -> None:
    """The main thread hears no signal there, and python's own handlers wait for it."""
    waits = tmp_path / "waits.py"
    waits.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, 2)\n"
        "dist.init_process_group('gloo', store=store, rank=int(sys.argv[1]), world_size=2)\n"
        "p = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([p], lr=0.1)\n"
        "p.sum().backward()\n"
        "optimizer.step()\n"
        "print('waits', flush=True)\n"
        "store.get('what nobody puts there')\n"
    )
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "halfstep", "run", "--json", str(found), "--", str(waits)]
    ranks = [start([*command, "0"]), start([sys.executable, str(waits), "1"])]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "waits\n"
            rank.send_signal(signal.SIGTERM)
        for rank in ranks:
            assert rank.wait(timeout=60) == -signal.SIGTERM  # the store would wait for half an hour
    finally:
        for rank in ranks:
            rank.kill()
    assert json.loads(found.read_text())["summary"]["applied"] == 1


CHILDREN = """
import multiprocessing, os
import torch

def train(lr):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(4):
        model(torch.randn(5, 3)).pow(2).mean().backward()
        optimizer.step()          # never cleared
        print("trained", lr)

def other(queue):
    queue.put(float(torch.ones(3).sum()))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=train, args=(0.1,)), context.Process(target=other, args=(queue,))]
    for child in children:
        child.start()
    print(queue.get())
    for child in children:
        child.join()
    pid = os.fork()
    if pid == 0:
        train(0.2)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_children_without_a_group_are_told_too_and_others_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "children.py"
    path.write_text(CHILDREN)
    diagnosis = diagnose(path)
    assert [f.rule for f in diagnosis.loud] == ["gradients-never-cleared"]
    assert diagnosis.summary["attempted"] == 8  # of two children, each on its own
    assert diagnosis.stdout == "3.0\n"
