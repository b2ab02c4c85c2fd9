"""One process of a run that is saved, ended and started again; what the tests of resuming on replicas start.

torchrun --nproc-per-node 2 -m tests.engine.restarts whole FOLDER       # train without a break, saving on the way
torchrun --nproc-per-node 2 --max-restarts 1 -m tests.engine.restarts again FOLDER
    # new processes, from what was saved; rank 1 is killed on the way, once, and torchrun starts both again
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from halfstep import MixedPrecisionManager, tokens

OWN, ONE, PARTS = "ddp, one file a rank", "ddp, one file", "ddp, distributed checkpoint"
KINDS = (OWN, ONE, PARTS, "fsdp2, distributed checkpoint")
GROWN = "ddp, one file of one process"  # saved there, continued by two
STOP, KILLED, END = 3, 6, 8  # updates: in the middle of an epoch of 5, the last of them short; and in the next one
EFFECTIVE = 8  # m = 2
NAMES = ("model", "optimizer", "scheduler", "manager")


def build(kind: str, record: Path | None = None) -> dict[str, Any]:
    """A run on as many replicas as there are processes, with the same examples in an update on any number of them."""
    degree, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(0)
    own = kind == OWN  # every rank has masks of its own, and a loss scale that moves
    model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3 if own else 0.0), nn.Linear(16, 3))
    if degree > 1:
        model = DistributedDataParallel(model) if kind.startswith("ddp") else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (36,), generator=generator)
    labels[torch.rand(36, generator=generator) < 0.3] = -100
    data = TensorDataset(torch.randn(36, 4, generator=generator), labels)
    sampler = DistributedSampler(data, degree, rank, seed=7)
    torch.manual_seed(100 + rank)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        "manager": MixedPrecisionManager(
            precision="fp16" if own else "fp32", init_scale=2.0**20, growth_interval=2, max_norm=0.5, record=record
        ),
        "loader": DataLoader(data, 2, sampler=sampler),
        "size": EFFECTIVE // 2 // degree,
    }


def train(run: dict[str, Any], after: Callable[[int], None] = lambda update: None) -> list[dict[str, Any]]:
    """Train to END attempted updates in all -> a row for each after STOP. ``after`` is called after each."""
    manager, rows = run["manager"], []
    weight = tokens(1, shift=False)
    while True:
        groups = manager.groups(run["loader"], run["size"], weight=weight, model=run["model"])
        run["loader"].sampler.set_epoch(groups.epoch)
        for group in groups:
            for x, y in group:
                with manager.context():
                    out = run["model"](x)
                manager.backward(F.cross_entropy(out.float(), y))
            update = manager.step(run["model"], run["optimizer"], run["scheduler"])
            if update.attempted_updates > STOP:
                rows.append(update.as_dict())
            after(update.attempted_updates)
            if update.attempted_updates == END:
                return rows


def parts(run: dict[str, Any]) -> dict[str, Any]:
    return {"model": getattr(run["model"], "module", run["model"]), **{name: run[name] for name in NAMES[1:]}}


def save(run: dict[str, Any], kind: str, path: Path) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if kind.endswith("checkpoint"):
        dcp.save(distributed(run), checkpoint_id=path)
    elif kind == OWN or rank == 0:
        state = {name: part.state_dict() for name, part in parts(run).items()}
        state["manager"] = run["manager"].state_dict(random_state=kind == OWN)
        torch.save(state, path.with_suffix(f".{rank}"))


def load(run: dict[str, Any], kind: str, path: Path) -> None:
    if not kind.endswith("checkpoint"):
        state = torch.load(path.with_suffix(f".{dist.get_rank() if kind == OWN else 0}"), weights_only=True)
        for name, part in parts(run).items():
            part.load_state_dict(state[name])
        return
    state = distributed(run)
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(run["model"], run["optimizer"], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    run["scheduler"].load_state_dict(state["scheduler"])
    run["manager"].load_state_dict(state["manager"])


def distributed(run: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = get_state_dict(run["model"], run["optimizer"])
    scheduler, manager = run["scheduler"].state_dict(), run["manager"].state_dict()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "manager": manager}


def result(run: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What two runs are compared by, of this rank. ``repr`` keeps the NaN of a skipped update comparable."""
    parameters = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in run["model"].parameters()]
    report = run["manager"].report()
    return {"parameters": parameters, "rows": repr(rows), "counters": report["counters"], "batch": report["batch"]}


def main(verb: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    for kind in KINDS if verb == "whole" else (*KINDS, GROWN):
        run = build(kind, folder / f"record of {verb}, {kind}")

        def after(update: int, run: dict[str, Any] = run, kind: str = kind) -> None:
            if verb == "whole" and update == STOP:
                save(run, kind, folder / kind)
            if verb == "again" and update == KILLED and kind == OWN:
                dist.barrier()
                if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)

        if verb == "again":
            load(run, kind, folder / kind)
        rows = train(run, after)
        torch.save(result(run, rows), folder / f"{verb}, {kind}, {dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
