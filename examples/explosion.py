"""A segmentation network whose one convolution explodes under FP16: the script as its author wrote it, plain torch.

    halfstep run examples/explosion.py      # the doctor names the module, the operator and the line
    python examples/overflow.py             # FP32 beside it, the remedies, and the proof

Photographs come in as they were read, 0 to 255, nothing normalises them, and the convolution of the decoder, the only
layer that is not taken over from elsewhere, was given a learning rate of its own: 1.0, where the others have 0.005.
GroupNorm behind it hides how large its outputs get. FP32 has room for them, FP16 has not.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenes import INK, VOID, scenes

RATE, RATE_UP = 0.005, 1.0
EXAMPLES = 4
Batch = tuple[Tensor, Tensor]


class Segmenter(nn.Module):
    """One halving, one doubling; ``up`` joins the coarse and the fine half."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, width, 3, padding=1)
        self.coarse = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = F.relu(self.fine(images))
        coarse = F.relu(self.coarse(F.max_pool2d(fine, 2)))
        both = torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1)
        return self.head(F.relu(self.norm(self.up(both))))


def photographs(count: int, *, validation: bool = False) -> Batch:
    """Scenes at half their size, (count, 3, 24, 24) from 0 to 255, and their labels."""
    images, labels = scenes(count, validation=validation)
    return F.avg_pool2d((images + 0.5) * 255, 2).contiguous(), labels[:, ::2, ::2].contiguous()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=VOID)


def network(seed: int = 0) -> Segmenter:
    torch.manual_seed(seed)
    return Segmenter()


def optimizer_of(model: Segmenter, rate_up: float = RATE_UP) -> torch.optim.Optimizer:
    up = list(model.up.parameters())
    others = [p for p in model.parameters() if all(p is not q for q in up)]
    return torch.optim.Adam([{"params": others}, {"params": up, "lr": rate_up}], lr=RATE)


def batches(data: Batch, seed: int = 0) -> list[Batch]:
    """96 micro-batches, the same for every run."""
    order = torch.Generator().manual_seed(seed)
    chosen = [torch.randint(0, len(data[0]), (EXAMPLES,), generator=order) for _ in range(96)]
    return [(data[0][rows], data[1][rows]) for rows in chosen]


@torch.no_grad()
def intersection_over_union(model: nn.Module, data: Batch) -> float:
    """Of the ink, over all pixels of the scenes."""
    found = (model(data[0]).argmax(1) == INK) & (data[1] != VOID)
    ink = data[1] == INK
    return float((found & ink).sum() / (found | ink).sum())


def main(updates: int = 32) -> None:
    model = network()
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu")
    for number, batch in enumerate(batches(photographs(64))[:updates], 1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if number % 8 == 0:
            print(f"attempted update {number}: loss {loss.item():.4f}, loss scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
