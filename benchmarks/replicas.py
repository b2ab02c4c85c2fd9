"""The engine on several replicas, one process each: right, or exit 1; then what an update costs there.

    torchrun --nproc-per-node 2 benchmarks/replicas.py [--device cuda]      # NCCL; --device cpu: gloo

Every check prints one line on the first rank. References are FP64 on the CPU, of all replicas' examples in one batch.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from correctness import TOLERANCES, Batch, network, on, ragged
from halfstep import MixedPrecisionManager
from halfstep.engine.reference import Term, group_gradient, norm


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer)
    return fully_shard(model)


def batches_of(rank: int) -> list[Batch]:
    """Three ragged micro-batches; the first rank's last one supervises nothing."""
    batches = ragged(10 + rank, 5 + rank, 2, 9 - rank % 5)
    if rank == 0:
        batches[-1][1].fill_(-100)
    return batches


def counted(batch: Batch) -> Tensor:
    return (batch[1] != -100).sum()


def whole(tensor: Tensor) -> Tensor:
    """A parameter in FP64 on the CPU, gathered where it is sharded. A collective."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return (full() if full else tensor).detach().double().cpu()


def check_gradient(device: str, wrap: Callable[[nn.Module], nn.Module], precision: str) -> str:
    """Laws 2 and 7: plain SGD moves parameters by the FP64 gradient of all replicas' supervised examples."""
    twin = network().double()
    rows = [row for rank in range(dist.get_world_size()) for x, y in batches_of(rank) for row in zip(x, y, strict=True)]
    losses = [
        lambda x=x, y=y: [Term([F.cross_entropy(twin(x[None].double()), y[None])], 1)] for x, y in rows if y != -100
    ]
    true = group_gradient(list(twin.parameters()), losses)
    model = wrap(network().to(device))
    before = [whole(p) for p in model.parameters()]
    manager = MixedPrecisionManager(precision=precision, device=device, max_norm=None, init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    update = one_update(manager, model, optimizer, on(device, batches_of(dist.get_rank())))
    moved = [b - whole(p) for b, p in zip(before, model.parameters(), strict=True)]
    gaps = [m - g for m, g in zip(moved, true.gradients, strict=True) if g is not None]
    error = norm(gaps) / sum(true.contribution_norms)
    assert update.weight == len(losses), f"W = {update.weight}, {len(losses)} examples are supervised"
    assert error <= TOLERANCES[precision], f"{error:.1e} off the FP64 big batch, {TOLERANCES[precision]} allowed"
    true_norm = norm([g for g in true.gradients if g is not None])
    assert math.isclose(update.grad_norm, true_norm, rel_tol=TOLERANCES[precision] * 10), (
        f"norm {update.grad_norm}, not {true_norm}"
    )
    return f"{error:.1e} off the FP64 big batch"


def one_update(manager: MixedPrecisionManager, model: nn.Module, optimizer: Any, batches: list[Batch]) -> Any:
    group = next(manager.groups(batches, len(batches), weight=counted, model=model))
    for x, y in group:
        with manager.context():
            loss = F.cross_entropy(model(x).float(), y)
        manager.backward(loss)
    return manager.step(model, optimizer)


def check_skip(device: str, wrap: Callable[[nn.Module], nn.Module]) -> str:
    """Laws 5 and 6: a non-finite value on the last rank alone is skipped on all, and nothing has changed."""
    rank = dist.get_rank()
    model = wrap(network().to(device))
    before = [whole(p) for p in model.parameters()]
    manager = MixedPrecisionManager(precision="fp16", device=device, init_scale=2.0**10)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = on(device, batches_of(rank))
    if rank == dist.get_world_size() - 1:
        batches[1][0][0, 0] = math.inf
    update = one_update(manager, model, optimizer, batches)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (update.outcome, manager.loss_scale))
    assert set(outcomes) == {("skipped", 2.0**9)}, f"outcomes and scales by rank: {outcomes}"
    assert all(torch.equal(b, whole(p)) for b, p in zip(before, model.parameters(), strict=True)), "parameters moved"
    return "overflow on one rank: all skip, all halve the scale, no parameter moves"


def figure(device: str, precision: str, turns: int) -> str:
    """One update of a DDP model, A = 4, next to a hand-written loop (``no_sync``, clip, fused AdamW)."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
    models = [ddp(nn.Sequential(*layers, nn.Linear(128, 16)).to(device)) for _ in range(2)]
    batches = [(torch.randn(32, 128, device=device), torch.randint(16, (32,), device=device)) for _ in range(4)]
    manager = MixedPrecisionManager(precision=precision, device=device)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    weight = len(batches[0][1]) * len(batches) * dist.get_world_size()

    def ours() -> None:
        one_update(manager, models[0], optimizers[0], batches)

    def by_hand() -> None:
        model = models[1]
        for number, (x, y) in enumerate(batches):
            model.require_backward_grad_sync = number + 1 == len(batches)
            with manager.context():
                loss = F.cross_entropy(model(x).float(), y, reduction="sum")
            (loss * dist.get_world_size() / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizers[1].step()
        optimizers[1].zero_grad()

    times: dict[Callable[[], None], list[float]] = {ours: [], by_hand: []}
    for turn in range(turns + 2):
        for loop, taken in times.items():
            dist.barrier()
            start = perf_counter()
            for _ in range(5):
                loop()
            if device != "cpu":
                torch.accelerator.synchronize()
            if turn >= 2:
                taken.append((perf_counter() - start) / 5)
    mine, plain = (statistics.median(taken) for taken in times.values())
    return f"{mine * 1e3:.2f} ms, {plain * 1e3:.2f} ms by hand: × {mine / plain:.2f} ({precision}, A = 4)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=20)
    chosen = parser.parse_args()
    device = chosen.device
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}.get(device), timeout=datetime.timedelta(seconds=60))
    checks: dict[str, Callable[[], str]] = {}
    for name, wrap in (("DDP", ddp), ("FSDP2", fsdp2)):
        for precision in TOLERANCES:
            checks[f"{name} {precision}"] = lambda w=wrap, p=precision: check_gradient(device, w, p)
        checks[f"{name} skip"] = lambda w=wrap: check_skip(device, w)
    checks["one update"] = lambda: figure(device, "bf16", chosen.turns)
    for name, check in checks.items():
        try:
            words = check()
        except Exception as error:  # the others may wait for this rank: the first wrong check is the last
            print(f"  WRONG  {name:14} on rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)
            return 1
        if dist.get_rank() == 0:
            print(f"  right  {name:14} {words}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
