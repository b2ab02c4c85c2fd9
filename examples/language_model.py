"""Train a small byte transformer on the standard library's own functions, on one process or on many.

    python examples/language_model.py                                       # about a minute on two CPU cores
    torchrun --nproc-per-node 2 examples/language_model.py                  # the same updates, on two replicas
    python examples/language_model.py --table                               # how a batch is split changes nothing

Documents have the lengths they have; short ones are filled up, and what was filled up is not supervised. An update is
the mean over all bytes of its ``--effective`` documents, however they are split: ``m`` documents a micro-batch, ``A``
micro-batches, ``D`` replicas. Replica ``r`` takes every D-th document of the epoch's order, so that the same documents
meet in the same update under every split. The loop that matters is ``Training.updates``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from halfstep import MixedPrecisionManager, Update, tokens
from progress import Progress, conclude
from sources import IGNORE, Batch, Documents, collate, documents


class Split(NamedTuple):
    """How the documents of an update are split."""

    m: int  # documents of one forward
    A: int  # forwards of one update, on each replica
    D: int  # replicas

    @property
    def effective(self) -> int:
        return self.m * self.A * self.D


TABLE = [Split(*row) for row in ((2, 8, 2), (1, 16, 2), (4, 4, 2), (2, 16, 1), (1, 32, 1), (4, 8, 1), (2, 8, 1))]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # what fills up stands after all bytes
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    """Bytes before -> logits of the next byte, (m, length) -> (m, length, 256). No dropout, no norm over the batch."""

    def __init__(self, width: int, depth: int, longest: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, before: Tensor) -> Tensor:
        places = torch.arange(before.shape[1], device=before.device)
        return self.head(self.norm(self.blocks(self.byte(before) + self.place(places))))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    before, labels, _ = batch
    return F.cross_entropy(model(before).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


class Sizes(NamedTuple):
    learn: int  # documents; half a group more than whole groups of 32, so that every epoch has a short last one
    held_out: int
    longest: int  # bytes of a document
    width: int
    depth: int
    updates: int
    every: int  # updates between validations


SIZES = {
    "full": Sizes(2576, 256, 256, 96, 3, 120, 20),
    "small": Sizes(336, 32, 128, 48, 2, 20, 10),
    "quick": Sizes(80, 16, 96, 32, 2, 6, 3),
}


class Training:
    """One run on this replica: model, optimizer, schedule, and the manager that makes every update."""

    def __init__(self, chosen: argparse.Namespace, split: Split, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(chosen.seed)
        self.split, self.device = split, device
        self.net = Transformer(sizes.width, sizes.depth, sizes.longest).to(device)
        self.model = DistributedDataParallel(self.net) if split.D > 1 else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3, betas=(0.9, 0.99), fused=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, chosen.updates + 1, pct_start=0.3)
        self.manager = MixedPrecisionManager(precision=chosen.precision, record=chosen.record)
        texts = documents(sizes.learn + sizes.held_out, sizes.longest)
        if len(texts) < sizes.learn + sizes.held_out:
            raise SystemExit(f"only {len(texts)} functions found: is the standard library here without its sources?")
        rank = dist.get_rank() if split.D > 1 else 0
        data = Documents(texts[sizes.held_out :])
        self.sampler = DistributedSampler(data, split.D, rank, seed=chosen.seed, drop_last=True)
        self.loader = DataLoader(data, split.m, sampler=self.sampler, collate_fn=self.collate)
        held_out = list(enumerate(texts[: sizes.held_out]))[rank :: split.D]
        self.held_out = [self.collate(held_out[first : first + 32]) for first in range(0, len(held_out), 32)]
        self.sums: list[Tensor] = []  # of each update: element losses of this replica, and their number
        self.bits = float("nan")

    def collate(self, rows: list[tuple[int, bytes]]) -> Batch:
        before, labels, indices = collate(rows)
        return before.to(self.device), labels.to(self.device), indices

    def updates(self) -> Iterator[Update]:
        """Updates without end, epoch after epoch. The last group of an epoch is short, and exact all the same."""
        weight = tokens(1, shift=False)
        while True:
            groups = self.manager.groups(self.loader, self.split.A, weight=weight, model=self.model, ids=2)
            self.sampler.set_epoch(groups.epoch)
            for group in groups:
                sums = torch.zeros(2, device=self.device, dtype=torch.float64)
                for batch in group:
                    with self.manager.context():
                        loss = loss_of(self.model, batch)
                    self.manager.backward(loss)
                    count = weight(batch)
                    sums += torch.stack([loss.detach() * count, count])
                self.sums.append(sums)
                yield self.manager.step(self.model, self.optimizer, self.scheduler)

    @property
    def loss(self) -> float:
        """Of the last update, on this replica: the mean over its own bytes."""
        return float(self.sums[-1][0] / self.sums[-1][1])

    def losses(self) -> list[float]:
        """Of each update of this run: the mean over all its bytes, on all replicas. A collective."""
        if not self.sums:
            return []
        sums = torch.stack(self.sums)
        if self.split.D > 1:
            dist.all_reduce(sums)
        return (sums[:, 0] / sums[:, 1]).tolist()

    @torch.no_grad()
    def validate(self) -> float:
        """Bits a byte of the documents held out, each replica's share of them added up. A collective."""
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        self.net.eval()
        for batch in self.held_out:
            count = (batch[1] != IGNORE).sum()
            with self.manager.context():
                loss = loss_of(self.net, batch)
            sums += torch.stack([loss * count, count])
        self.net.train()
        if self.split.D > 1:
            dist.all_reduce(sums)
        self.bits = float(sums[0] / sums[1]) / math.log(2.0)
        self.manager.log(bits_per_byte=self.bits)
        return self.bits

    def _parts(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, "manager": self.manager}

    def save(self, path: Path) -> None:
        """At an update boundary. Replicas hold the same, so the first one writes; the file is whole or the old one."""
        if self.split.D == 1 or dist.get_rank() == 0:
            torch.save({name: part.state_dict() for name, part in self._parts().items()}, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> int:
        """The updates attempted before. The split may be another one since: their documents are not seen again."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        return state["manager"]["counters"]["attempted"]


def train(chosen: argparse.Namespace, split: Split, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """One run under one split -> what it came to, the same on every replica but for ``record``."""
    began = perf_counter()
    training = Training(chosen, split, sizes, device)
    before = training.load(chosen.checkpoint) if chosen.checkpoint and chosen.checkpoint.exists() else 0
    updates = training.updates()
    about = f"m = {split.m}, A = {split.A}, D = {split.D}: {split.effective} documents an update, on {device}"
    with Progress(about, chosen.updates, quiet=split.D > 1 and dist.get_rank() != 0) as progress:
        for done in range(before + 1, chosen.updates + 1):
            update = next(updates)
            validated = done % sizes.every == 0 or done == chosen.updates
            if validated:
                training.validate()
                if chosen.checkpoint:
                    training.save(chosen.checkpoint)
            progress.show(done, training.loss, update, training.bits, validated)
    return {
        **split._asdict(),
        "losses": training.losses(),
        "bits_per_byte": training.bits,
        "seconds": perf_counter() - began,
        "record": training.manager.report(),
    }


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=("auto", "bf16", "fp16", "fp32"), help="default: auto; fp32 in a table")
    parser.add_argument("--effective", type=int, default=32, help="documents of an update (default: %(default)s)")
    parser.add_argument(
        "--micro-batch",
        type=int,
        nargs="+",
        default=[4],
        metavar="m",
        help="documents of a forward (default: 4); A follows from it. Several: one run after the other",
    )
    parser.add_argument("--size", choices=SIZES, help="of network and data (default: full; small with --table)")
    parser.add_argument("--quick", action="store_const", const="quick", dest="size", help="seconds: does it run?")
    parser.add_argument("--updates", type=int, help="default: 120; 20 if small; 6 if quick")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="the same updates under seven splits; starts torchrun")
    parser.add_argument("--brief", action="store_true", help="leave the record out at the end")
    parser.add_argument("--checkpoint", type=Path, help="save there at every validation; go on from it where it exists")
    parser.add_argument("--record", type=Path, help="a folder for the journal of every update")
    parser.add_argument("--json", type=Path, help="write what was reached, and the records, there")
    chosen = parser.parse_args(arguments)
    chosen.size = chosen.size or ("small" if chosen.table else "full")
    chosen.precision = chosen.precision or ("fp32" if chosen.table else "auto")
    chosen.updates = SIZES[chosen.size].updates if chosen.updates is None else chosen.updates
    replicas = int(os.environ.get("WORLD_SIZE", 1))
    if chosen.updates < 1:
        parser.error(f"--updates {chosen.updates}: at least 1")
    if chosen.checkpoint and len(chosen.micro_batch) > 1:
        parser.error("--checkpoint is of one run: give one --micro-batch")
    for m in chosen.micro_batch:
        if m < 1 or chosen.effective % (m * replicas):
            parser.error(f"--effective {chosen.effective} is not m × A × D for m = {m} and D = {replicas}")
    chosen.splits = [Split(m, chosen.effective // (m * replicas), replicas) for m in chosen.micro_batch]
    return chosen


def table(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """One run a split of TABLE: torchrun where there are replicas, one process a batch for all splits of it."""
    runs: list[dict[str, Any]] = []
    common = [f"--{name}={getattr(chosen, name)}" for name in ("updates", "seed", "precision", "size")]
    for effective, replicas in dict.fromkeys((split.effective, split.D) for split in TABLE):
        python = [sys.executable]
        if replicas > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", replicas]
        micro_batches = [split.m for split in TABLE if (split.effective, split.D) == (effective, replicas)]
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "runs.json"
            own = ["--effective", effective, "--micro-batch", *micro_batches, "--brief", "--json", found]
            subprocess.run([str(word) for word in [*python, __file__, *common, *own]], check=True)
            runs += json.loads(found.read_text())["runs"]
    return runs


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    first = True
    if chosen.table:
        runs = table(chosen)
    else:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or torch.device("cpu")
        distributed = "WORLD_SIZE" in os.environ
        if distributed:
            if accelerator is not None:
                device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
                torch.accelerator.set_device_index(device.index)
            dist.init_process_group()
            first = dist.get_rank() == 0
        runs = [train(chosen, split, SIZES[chosen.size], device) for split in chosen.splits]
        if distributed:
            dist.destroy_process_group()
    if first:
        conclude(runs, table=chosen.table, brief=chosen.brief)
        if chosen.json:
            chosen.json.parent.mkdir(parents=True, exist_ok=True)
            chosen.json.write_text(json.dumps({"seed": chosen.seed, "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
