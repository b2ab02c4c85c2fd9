"""What one whole update costs beside the best hand-written loop: same model, same data, in turn, in one process.

    python benchmarks/tiny_update.py [--device cpu] [--precision bf16] [--layers 6 --width 128 --micro-batches 4]

One update is A forwards and backwards, unscale, clip, optimizer, clear. Every contestant trains its own copy from the
same start on the same data; their parameters are compared at the end, and a figure is only printed for those that did
the same work. Contestants take turns in short bursts, so that what else runs on the machine hits all alike; the ratio
is the median over turns of (contestant / hand-written of the same turn). Peers are timed where they are installed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import MixedPrecisionManager

MAX_NORM = 2.0
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
Batch = tuple[Tensor, Tensor]
Update = Callable[[Sequence[Batch]], None]


def mlp(layers: int, width: int) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, width))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def by_hand(model: nn.Module, precision: str) -> Update:
    """The best loop to write by hand: one autocast object, fused AdamW, foreach clipping, gradients set to None."""
    optimizer = adamw(model)
    device = next(model.parameters()).device.type
    parameters = list(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    autocast = torch.autocast(device, HALF.get(precision), enabled=precision in HALF)

    def update(group: Sequence[Batch]) -> None:
        for x, y in group:
            with autocast:
                loss = F.cross_entropy(model(x), y)
            loss = loss / len(group)
            if scaler.is_enabled():
                loss = scaler.scale(loss)
            loss.backward()
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def by_manager(model: nn.Module, precision: str) -> Update:
    """halfstep, the flat loop: contributions divided by the caller, as above. Monitoring is on, as by default."""
    manager = MixedPrecisionManager(precision=precision, max_norm=MAX_NORM)
    optimizer = adamw(model)

    def update(group: Sequence[Batch]) -> None:
        for x, y in group:
            with manager.context():
                loss = F.cross_entropy(model(x), y)
            manager.backward(loss / len(group))
        manager.step(model, optimizer)

    return update


def by_groups(model: nn.Module, precision: str) -> Update:
    """halfstep with denominators counted ahead: exact for ragged groups, which none of the others is."""
    manager = MixedPrecisionManager(precision=precision, max_norm=MAX_NORM)
    optimizer = adamw(model)

    def update(batches: Sequence[Batch]) -> None:
        for group in manager.groups(batches, len(batches), weight=lambda batch: len(batch[1])):
            for x, y in group:
                with manager.context():
                    loss = F.cross_entropy(model(x), y)
                manager.backward(loss)
            manager.step(model, optimizer)

    return update


def by_accelerate(model: nn.Module, precision: str, micro_batches: int) -> Update:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=micro_batches,
        cpu=next(model.parameters()).device.type == "cpu",
    )
    prepared, optimizer = accelerator.prepare(model, adamw(model))

    def update(group: Sequence[Batch]) -> None:
        for x, y in group:
            with accelerator.accumulate(prepared):
                loss = F.cross_entropy(prepared(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return update


def by_fabric(model: nn.Module, precision: str) -> Update:
    from lightning_fabric import Fabric

    device = next(model.parameters()).device.type
    kind = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}[precision]
    fabric = Fabric(accelerator=device, devices=1, precision=kind)  # type: ignore[arg-type]
    prepared, optimizer = fabric.setup(model, adamw(model))

    def update(group: Sequence[Batch]) -> None:
        for k, (x, y) in enumerate(group):
            with fabric.no_backward_sync(prepared, enabled=k < len(group) - 1):
                loss = F.cross_entropy(prepared(x), y)
                fabric.backward(loss / len(group))
        fabric.clip_gradients(prepared, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    return update


def contestants(model: nn.Module, precision: str, micro_batches: int) -> dict[str, tuple[nn.Module, Update]]:
    makers: dict[str, Callable[[nn.Module], Update]] = {
        "hand-written": lambda m: by_hand(m, precision),
        "halfstep": lambda m: by_manager(m, precision),
        "halfstep groups": lambda m: by_groups(m, precision),
    }
    if importlib.util.find_spec("accelerate"):
        makers["accelerate"] = lambda m: by_accelerate(m, precision, micro_batches)
    if importlib.util.find_spec("lightning_fabric"):
        makers["fabric"] = lambda m: by_fabric(m, precision)
    made = {}
    for name, make in makers.items():
        own = copy.deepcopy(model)
        made[name] = (own, make(own))
    return made


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    model = mlp(arguments.layers, arguments.width).to(device)
    group = [
        (
            torch.randn(arguments.examples, arguments.width, device=device),
            torch.randint(0, arguments.width, (arguments.examples,), device=device),
        )
        for _ in range(arguments.micro_batches)
    ]
    made = contestants(model, arguments.precision, arguments.micro_batches)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    # One thread on a CPU: its own processor time, which other programs on the machine do not add to.
    clock = time.process_time if device.type == "cpu" and arguments.threads == 1 else time.perf_counter

    for _, update in made.values():
        for _ in range(arguments.updates):
            update(group)
    turns: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(arguments.turns):
        names = list(made)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody is always first
            update = made[name][1]
            wait()
            start = clock()
            for _ in range(arguments.updates):
                update(group)
            wait()
            turns[name].append((clock() - start) / arguments.updates)

    hand = turns["hand-written"]
    moved = _distance(_values(made["hand-written"][0]), _values(model))
    rows = {}
    for name, (own, _) in made.items():
        apart = _distance(_values(own), _values(made["hand-written"][0])) / moved
        ratios = [mine / theirs for mine, theirs in zip(turns[name], hand, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        rows[name] = {
            "microseconds": statistics.median(turns[name]) * 1e6,
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [quartiles[0], quartiles[2]],
            "same_work": apart < 0.05,
            "apart": apart,
        }
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": vars(arguments),
        "clock": clock.__name__,
        "updates": rows,
    }


def _values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return float(sum(((a - b).double() ** 2).sum() for a, b in zip(one, other, strict=True)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=4, help="A")
    parser.add_argument("--examples", type=int, default=32, help="m, of one micro-batch")
    parser.add_argument("--updates", type=int, default=5, help="updates of one turn")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = measure(arguments)
    print(
        f"one update: {arguments.layers} x {arguments.width} MLP ({found['parameters']:,} parameters), A = "
        f"{arguments.micro_batches}, m = {arguments.examples}, {arguments.precision}, {found['device']}, "
        f"torch {found['torch']}; {arguments.turns} turns of {arguments.updates} updates, {found['clock']}"
    )
    for name, row in found["updates"].items():
        low, high = row["ratio_quartiles"]
        note = "" if row["same_work"] else f"   did other work: {row['apart']:.0%} of the way apart"
        print(f"  {name:16} {row['microseconds']:9.1f} us   x {row['ratio']:.3f}  ({low:.3f} to {high:.3f}){note}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
