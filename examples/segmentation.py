"""Train a small U-Net to find handwritten ink on photographs, in mixed precision and, beside it, in FP32.

    python examples/segmentation.py              # under two minutes on two CPU cores
    python examples/segmentation.py --help

Both runs start from the same weights and see the same micro-batches in the same order; they are advanced in turn,
one update each, so that what is said about their speed was measured on the same machine at the same time. The loop
that matters is ``Training.updates``: every update is the gradient of the mean over all supervised pixels of its group,
whatever the sizes of the scenes and however short the last group of an epoch is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that wait sleep, kinder to busy machines

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from board import Board
from halfstep import MixedPrecisionManager, Update
from scenes import INK, VOID, scenes

MICRO_BATCH = 8  # m: scenes of one forward
ACCUMULATE = 3  # A: micro-batches of one update
AIM = 0.80  # validation IoU

Batch = tuple[Tensor, Tensor]


class UNet(nn.Module):
    """Two halvings, two doublings. GroupNorm: a norm over the batch would make the update depend on its split."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fine = _block(3, width)
        self.middle = _block(width, 2 * width)
        self.coarse = _block(2 * width, 4 * width)
        self.to_middle = _block(6 * width, 2 * width)
        self.to_fine = _block(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        middle = self.to_middle(torch.cat([middle, F.interpolate(coarse, scale_factor=2)], 1))
        return self.head(self.to_fine(torch.cat([fine, F.interpolate(middle, scale_factor=2)], 1)))


def _block(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.GroupNorm(4, width), nn.ReLU()]
    return nn.Sequential(*layers)


def supervised(batch: Batch) -> Tensor:
    """w of a micro-batch: its pixels that are no padding."""
    return (batch[1] != VOID).sum()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, ignore_index=VOID)


class Training:
    """One run: model, optimizer, schedule, and the manager that makes every update."""

    def __init__(self, precision: str, data: TensorDataset, updates: int, seed: int, width: int) -> None:
        torch.manual_seed(seed)
        self.model = UNet(width).to(data.tensors[0].device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3, betas=(0.9, 0.99), fused=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 4e-3, updates + 1, pct_start=0.15)
        self.manager = MixedPrecisionManager(precision=precision, max_norm=2.0)
        order = torch.Generator().manual_seed(seed)  # of its own: both runs see the same micro-batches
        self.loader = DataLoader(data, MICRO_BATCH, shuffle=True, generator=order, collate_fn=_collate)
        self._updates = self.updates()
        self.last: Update | None = None
        self.iou = float("nan")
        self.rates: list[float] = []  # examples per second, of each update

    def updates(self) -> Iterator[Update]:
        """Updates without end, epoch after epoch. The last group of an epoch is short, and exact all the same."""
        while True:
            for group in self.manager.groups(self.loader, ACCUMULATE, weight=supervised):
                for batch in group:
                    with self.manager.context():
                        loss = loss_of(self.model, batch)
                    self.manager.backward(loss)
                yield self.manager.step(self.model, self.optimizer, self.scheduler)

    def advance(self) -> Update:
        """One update, timed."""
        start = perf_counter()
        update = next(self._updates)
        update.applied  # noqa: B018 - wait for the device, where there is one
        self.rates.append((update.examples or 0) / (perf_counter() - start))
        self.last = update
        return update

    @torch.no_grad()
    def validate(self, images: Tensor, labels: Tensor) -> float:
        """Intersection over union of the ink, over all pixels of all validation scenes."""
        both = either = 0
        self.model.eval()
        for image, label in zip(images.split(50), labels.split(50), strict=True):
            with self.manager.context():
                found = (self.model(image).argmax(1) == INK) & (label != VOID)
            both += int((found & (label == INK)).sum())
            either += int((found | (label == INK)).sum())
        self.model.train()
        self.iou = both / either
        self.manager.log(validation_iou=self.iou)
        return self.iou

    @property
    def examples_per_second(self) -> float:
        """The median over all updates: another program that takes the cores for a moment does not count."""
        return statistics.median(self.rates) if self.rates else float("nan")


def _collate(rows: list[Batch]) -> Batch:
    images = torch.stack([image for image, _ in rows])
    return images.contiguous(memory_format=torch.channels_last), torch.stack([label for _, label in rows])


class Stop:
    """Ctrl-C lets the update under way finish; a second one ends at once."""

    def __enter__(self) -> Stop:
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def memory(training: Training, batch: Batch) -> dict[str, int]:
    """Bytes, counted on the tensors themselves: what one forward keeps for its backward, and what outlives updates."""
    parameters = list(training.model.parameters())
    lasting = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), training.manager.context():
        loss_of(training.model, batch)  # the graph is dropped: nothing is contributed
    states = [t for s in training.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return {
        "kept for backward, one micro-batch": sum(kept.values()),
        "parameters and optimizer state": sum(t.nbytes for t in [*parameters, *states]),
        "checkpoint of the model": sum(t.nbytes for t in training.model.state_dict().values()),
    }


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Segment handwritten ink on photographs: mixed precision and FP32 side by side, one update each "
        "in turn, with the record of every policy and counter at the end.",
        epilog="Ctrl-C stops after the current update and still prints what was reached.",
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="auto: bf16 where the device computes it natively, else fp16 with a loss scale (default). "
        "fp32 runs alone. fp16 on a CPU is emulated there, about thirty times slower",
    )
    parser.add_argument("--updates", type=int, help="updates of each run (default: 160; 8 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of scenes, weights and order (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("out/segmentation.json"), help="where the records go (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a few scenes, a thin network, seconds: does it run?")
    chosen = parser.parse_args(arguments)
    if chosen.updates is None:
        chosen.updates = 8 if chosen.quick else 160
    if chosen.updates < 1:
        parser.error(f"--updates {chosen.updates}: at least 1")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    chosen = options(arguments)
    began = perf_counter()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    count, held_out, width, every = (76, 24, 8, 4) if chosen.quick else (1514, 200, 32, 32)
    updates = chosen.updates
    data = TensorDataset(*(t.to(device) for t in scenes(count, seed=chosen.seed)))
    images, labels = (t.to(device) for t in scenes(held_out, validation=True, seed=chosen.seed))

    precisions = [chosen.precision] if chosen.precision == "fp32" else [chosen.precision, "fp32"]
    trainings = [Training(p, data, updates, chosen.seed, width) for p in precisions]
    about = f"{count} scenes, m = {MICRO_BATCH}, A = {ACCUMULATE}; {held_out} others to validate on; on {device}"
    board = Board(trainings, updates, about)
    with Stop() as stop, board:
        for done in range(1, updates + 1):
            for training in trainings:
                training.advance()
            validated = done % every == 0 or done == updates or stop.asked
            if validated:
                for training in trainings:
                    training.validate(images, labels)
            board.show(done, validated)
            if stop.asked:
                break

    batch = _collate([data[i] for i in range(MICRO_BATCH)])
    counted = [memory(training, batch) for training in trainings]
    reports = [training.manager.report() for training in trainings]
    if stop.asked:
        print(f"stopped by Ctrl-C after {done} of {updates} updates; what was reached:")
    board.conclude(counted, reports, None if chosen.quick else AIM, perf_counter() - began)
    write(chosen, trainings, counted, reports)
    return 130 if stop.asked else 0


def write(chosen: argparse.Namespace, trainings: list[Training], counted: list[dict[str, int]], reports: Any) -> None:
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    runs = [
        {
            "precision": report["precision"]["used"],
            "validation_iou": training.iou,
            "examples_per_second": training.examples_per_second,
            "bytes": sizes,
            "record": report,
        }
        for training, sizes, report in zip(trainings, counted, reports, strict=True)
    ]
    chosen.json.write_text(json.dumps({"seed": chosen.seed, "runs": runs}, indent=1) + "\n")
    print(f"records written to {chosen.json}")


if __name__ == "__main__":
    sys.exit(main())
