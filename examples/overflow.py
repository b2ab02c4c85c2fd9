"""From a loss that turned NaN to a cure that is proved: the network of ``explosion.py``, looked into and trained again.

    python examples/overflow.py             # about half a minute on one CPU core
    python examples/overflow.py --help

The broken run is followed to its first skipped update; that micro-batch is run in FP16 and in FP32
(``halfstep.compare``), remedies are tried on it (``.cure()``). Then the network is trained again from the same
weights, on the same micro-batches, once with each remedy, and the table says what came of it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import halfstep
from explosion import (
    RATE,
    RATE_UP,
    Batch,
    Segmenter,
    batches,
    intersection_over_union,
    loss_of,
    network,
    optimizer_of,
    photographs,
)
from halfstep import MixedPrecisionManager
from halfstep.errors import ScaleFloorError
from halfstep.probe.micro_batch.comparison import Comparison
from halfstep.probe.micro_batch.remedies import Cure
from halfstep.probe.table import table

LAST = 16  # updates whose mean loss is shown
LOWER = RATE_UP / 50


@dataclass
class Trained:
    """What a run came to. ``ended``: the engine gave up, since lowering the scale did not help."""

    name: str
    applied: int
    attempted: int
    loss_scale: float
    ended: bool
    loss: float
    iou: float


def broken(data: Batch) -> tuple[Segmenter, torch.optim.Optimizer, Batch, int]:
    """The run of ``explosion.py`` up to the first update that is skipped: model, optimizer, micro-batch, its number."""
    model = network()
    optimizer = optimizer_of(model)
    manager = MixedPrecisionManager(precision="fp16", device="cpu", max_norm=None)
    for number, batch in enumerate(batches(data), 1):
        with manager.context():
            loss = loss_of(model, batch)
        manager.backward(loss)
        if manager.step(model, optimizer).skipped:
            return model, optimizer, batch, number
    raise SystemExit("nothing overflowed: no update was skipped")


def looked_into(model: Segmenter, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[Comparison, Cure]:
    found = halfstep.compare(model, loss_of, batch, precision="fp16")
    return found, found.cure(optimizer)


def normalised(model: Segmenter) -> None:
    model.up = nn.Sequential(nn.BatchNorm2d(model.up.in_channels), model.up)


def trained(
    name: str,
    data: Batch,
    held_out: Batch,
    updates: int,
    precision: str = "fp16",
    change: Callable[[Segmenter], None] = lambda model: None,
    island: str | None = None,
    rate_up: float = RATE_UP,
) -> Trained:
    """A whole run, from the same weights and over the same micro-batches as all others."""
    model = network()
    change(model)
    optimizer = optimizer_of(model, rate_up)
    manager = MixedPrecisionManager(precision=precision, device="cpu", max_norm=None)
    if island is not None:
        manager.keep_fp32(model, island)
    made, ended = [], False
    for batch in batches(data)[:updates]:
        with manager.context():
            loss = loss_of(model, batch)
        manager.backward(loss)
        try:
            made.append(manager.step(model, optimizer))
        except ScaleFloorError:  # its message names the parameters, and the remedies
            ended = True
            break
    losses = [update.loss for update in made[-LAST:]]
    return Trained(
        name,
        sum(update.applied for update in made),
        manager.report()["counters"]["attempted"],
        manager.loss_scale,
        ended,
        sum(losses) / len(losses),
        intersection_over_union(model.eval(), held_out),
    )


def proved(cure: Cure, data: Batch, held_out: Batch, updates: int) -> list[Trained]:
    island = cure.line.split('"')[1]  # manager.keep_fp32(model, "up")
    runs = (
        ("FP16 as it is", {}),
        ("FP32 as it is", {"precision": "fp32"}),
        ("BF16 as it is", {"precision": "bf16"}),
        (f'FP16, keep_fp32(model, "{island}")', {"island": island}),
        (f"FP16, rate {LOWER:g} for up", {"rate_up": LOWER}),
        ("FP16, BatchNorm before up", {"change": normalised}),
        (f"FP16, both: BatchNorm and {LOWER:g}", {"change": normalised, "rate_up": LOWER}),
    )
    return [trained(name, data, held_out, updates, **settings) for name, settings in runs]  # type: ignore[arg-type]


def shown(runs: list[Trained]) -> str:
    head = ("run", "applied", "loss scale", f"loss, last {LAST}", "validation IoU")
    rows = [
        (
            run.name,
            f"{run.applied} of {run.attempted}" + (", given up" if run.ended else ""),
            f"{run.loss_scale:g}",
            f"{run.loss:.3f}",
            f"{run.iou:.3f}",
        )
        for run in runs
    ]
    return table(head, rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="A convolution explodes under FP16: found, held against FP32, cured, and proved by training again.",
        epilog="FP16 is emulated on CPUs: this network is small enough for it to take seconds.",
    )
    parser.add_argument("--updates", type=int, default=96, help="of each training run, 8 to 96 (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("out/overflow.json"), help="where the numbers go (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    if not 8 <= chosen.updates <= 96:
        parser.error(f"--updates {chosen.updates}: 8 to 96")
    data, held_out = photographs(64), photographs(64, validation=True)
    model, optimizer, batch, number = broken(data)
    print(f"update {number} was skipped; its micro-batch both ways:\n")
    found, cure = looked_into(model, optimizer, batch)
    print(found, cure, sep="\n\n")
    print(f"\nthe network trained again, {chosen.updates} updates each; the others' rate is {RATE:g}\n", flush=True)
    runs = proved(cure, data, held_out, chosen.updates)
    print(shown(runs))
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    numbers = {"update": number, "comparison": found.as_dict(), "cure": cure.as_dict()}
    numbers["runs"] = [{k: v if _is_plain(v) else str(v) for k, v in asdict(run).items()} for run in runs]
    chosen.json.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    print(f"\nnumbers written to {chosen.json}")
    return 0


def _is_plain(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


if __name__ == "__main__":
    sys.exit(main())
