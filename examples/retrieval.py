"""Late-interaction retrieval from scratch: which docstring belongs to this signature?

    python examples/retrieval.py            # about a minute on two CPU cores
    python examples/retrieval.py --help

A query keeps one vector per word; a document is pooled into a fixed number of vectors whatever its length (the idea
of ConstBERT); their score is MaxSim, the sum over query vectors of the best match among the document's.

The training loop is the one such trainers have: ``context``, ``backward``, ``step``. The only line that is halfstep's
is the one that makes the manager, and while nothing is skipped the parameters are bit for bit those of the trainer's
own manager (tests/examples). What changes: a skipped update no longer moves the schedule.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from halfstep import MixedPrecisionManager
from halfstep.report.run_page import show_run
from signatures import BUCKETS, PADDING, Pair, encode, pairs

QUERY_WORDS, DOCUMENT_WORDS = 12, 48
VECTORS = 8  # of every document
BATCH = 64  # queries; the other 63 documents are each one's negatives
SHARPNESS = 4.0  # of the softmax over scores
HELD_OUT = 500
CHANCE = sum(1 / rank for rank in range(1, 11)) / HELD_OUT  # MRR@10 of a random order


class LateInteraction(nn.Module):
    """Words from pieces, one self-attention layer, then one vector a word (query) or VECTORS in all (document)."""

    def __init__(self, width: int = 128, size: int = 64) -> None:
        super().__init__()
        self.pieces = nn.Embedding(BUCKETS, width, padding_idx=PADDING)
        self.place = nn.Parameter(torch.zeros(DOCUMENT_WORDS, width))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.pool = nn.Linear(DOCUMENT_WORDS, VECTORS)
        self.out = nn.Linear(width, size)
        nn.init.normal_(self.pieces.weight, std=width**-0.5)
        nn.init.zeros_(self.pieces.weight[PADDING].detach())

    def words(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(n, words, width) and the mask of words that are there."""
        there = ids[..., 0] != PADDING
        vectors = self.norms[0](self.pieces(ids).sum(2) + self.place[: ids.shape[1]])
        mixed, _ = self.attention(vectors, vectors, vectors, key_padding_mask=~there, need_weights=False)
        vectors = self.norms[1](vectors + mixed)
        return self.norms[2](vectors + self.inner(vectors)), there

    def query(self, ids: Tensor) -> Tensor:
        """(n, words, size); absent words are zero, and match nothing."""
        vectors, there = self.words(ids)
        return F.normalize(self.out(vectors), dim=-1) * there[..., None]

    def document(self, ids: Tensor) -> Tensor:
        """(n, VECTORS, size)."""
        vectors, there = self.words(ids)
        pooled = self.pool((vectors * there[..., None]).transpose(1, 2)).transpose(1, 2)
        return F.normalize(self.out(pooled), dim=-1)

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        """MaxSim of every query with every document: (queries, documents)."""
        return max_sim(self.query(queries), self.document(documents))


def max_sim(query: Tensor, document: Tensor) -> Tensor:
    return torch.einsum("qwd,nvd->qnwv", query, document).amax(-1).sum(-1)


def train(
    manager: Any,
    model: LateInteraction,
    queries: Tensor,
    documents: Tensor,
    updates: int,
    seed: int,
    show: Callable[[int, Tensor], None] = lambda done, loss: None,
) -> None:
    """``updates`` updates with any manager of the four verbs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=False, foreach=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, updates + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    target = torch.arange(BATCH, device=queries.device)
    for done in range(1, updates + 1):
        rows = torch.randperm(len(queries), generator=order)[:BATCH].to(queries.device)
        with manager.context():
            scores = model(queries[rows], documents[rows])
            loss = F.cross_entropy(scores * SHARPNESS, target)
        manager.backward(loss)
        manager.step(model, optimizer, scheduler)
        show(done, loss.detach())


@torch.no_grad()
def mrr(manager: Any, model: LateInteraction, queries: Tensor, documents: Tensor) -> float:
    """Mean over the queries of 1 / rank of the right document among all, 0 beyond rank 10."""
    with manager.context():
        stored = model.document(documents)
        scores = torch.cat([max_sim(model.query(some), stored) for some in queries.split(100)])
    right = scores.diagonal()[:, None]
    rank = (scores >= right).sum(1)  # a tie counts against us
    return float((1.0 / rank).masked_fill(rank > 10, 0.0).mean())


def split(found: list[Pair], seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Training pairs and HELD_OUT others."""
    found = found[:]
    random.Random(seed).shuffle(found)
    return found[HELD_OUT:], found[:HELD_OUT]


def tensors(some: list[Pair]) -> tuple[Tensor, Tensor]:
    return encode([p.signature for p in some], QUERY_WORDS), encode([p.docstring for p in some], DOCUMENT_WORDS)


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True, help="mixed precision, or FP32")
    parser.add_argument("--updates", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--quick", action="store_true", help="a few updates: does it run?")
    chosen = parser.parse_args(arguments)
    if chosen.updates < 1:
        parser.error(f"--updates {chosen.updates}: at least 1")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    updates = min(chosen.updates, 5) if chosen.quick else chosen.updates
    found = pairs()
    if len(found) < HELD_OUT + BATCH:
        raise SystemExit(f"only {len(found)} documented functions found: is the standard library here without sources?")
    training, held_out = split(found)
    print(f"{len(training)} pairs to learn from, {len(held_out)} held out; chance MRR@10 {CHANCE:.4f}")
    device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or "cpu"
    queries, documents, asked, stored = (t.to(device) for t in (*tensors(training), *tensors(held_out)))

    torch.manual_seed(chosen.seed)
    model = LateInteraction().to(device)
    manager = MixedPrecisionManager(chosen.amp)
    start = perf_counter()
    reached: list[float] = []

    def show(done: int, loss: Tensor) -> None:
        if done % 50 == 0 or done == updates:
            reached.append(mrr(manager, model, asked, stored))
            manager.log(mrr_at_10=reached[-1])
            spent = perf_counter() - start
            print(f"update {done:4d}   loss {float(loss):.3f}   MRR@10 {reached[-1]:.3f}   {spent:.0f} s", flush=True)

    status = 0
    try:
        train(manager, model, queries, documents, updates, chosen.seed, show)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; what was reached:")
        reached.append(mrr(manager, model, asked, stored))
        status = 130
    print(f"MRR@10 {reached[-1]:.3f}, {reached[-1] / CHANCE:.0f} times chance")
    report = manager.report()
    show_run(report, Console())
    if chosen.json:
        chosen.json.write_text(json.dumps({"mrr_at_10": reached[-1], "chance": CHANCE, "record": report}) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
