"""The engine on a device, before any figure is taken there: right, or exit 1.

    python benchmarks/correctness.py [--device cuda]

Every check prints one line. References are FP64 on the CPU (``halfstep.engine.reference``) or hand-written loops with
torch's own GradScaler on the same device.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import MixedPrecisionManager
from halfstep.engine.island import keep_fp32
from halfstep.engine.reference import Term, group_gradient, norm

WIDTH, CLASSES, MAX_NORM = 32, 16, 0.5
TOLERANCES = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 3e-2}  # law 7
Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))


def ragged(seed: int, *sizes: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(m, 8, generator=generator), torch.randint(0, CLASSES, (m,), generator=generator)) for m in sizes
    ]


def on(device: str, batches: Sequence[Batch]) -> list[Batch]:
    return [(x.to(device), y.to(device)) for x, y in batches]


@contextlib.contextmanager
def no_host_reads(device: str) -> Iterator[None]:
    """On CUDA: an error wherever the host waits for the device."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_gradient(device: str, precision: str) -> str:
    """Law 7 on ragged micro-batches: the folded update of plain SGD moves parameters by the FP64 gradient."""
    batches = ragged(1, 5, 2, 9)
    twin = network().double()
    losses = [
        lambda x=x, y=y: [
            Term([F.cross_entropy(twin(x[i : i + 1].double()), y[i : i + 1]) for i in range(len(y))], len(y))
        ]
        for x, y in batches
    ]
    true = group_gradient(list(twin.parameters()), losses)
    model = network().to(device)
    before = [p.detach().double().cpu() for p in model.parameters()]
    manager = MixedPrecisionManager(precision=precision, device=device, max_norm=None, init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    for group in manager.groups(on(device, batches), 3, weight=lambda batch: len(batch[1])):
        for x, y in group:
            with manager.context():
                loss = F.cross_entropy(model(x).float(), y)
            manager.backward(loss)
        manager.step(model, optimizer)
    moved = [b - p.detach().double().cpu() for b, p in zip(before, model.parameters(), strict=True)]
    gaps = [m - g for m, g in zip(moved, true.gradients, strict=True) if g is not None]
    error = norm(gaps) / sum(true.contribution_norms)
    assert error <= TOLERANCES[precision], f"{error:.1e} off the FP64 big batch, {TOLERANCES[precision]} allowed"
    return f"{error:.1e} off the FP64 big batch"


def check_against_scaler(device: str) -> str:
    """FP16 with overflows: outcome, scale and parameters of a hand-written GradScaler loop, no host read in step."""
    settings = {"init_scale": 2.0**10, "growth_interval": 2}
    ours, theirs = network().to(device), network().to(device)
    manager = MixedPrecisionManager(precision="fp16", device=device, max_norm=MAX_NORM, **settings)
    scaler = torch.amp.GradScaler(device, **settings)
    mine = torch.optim.AdamW(ours.parameters(), lr=1e-2, eps=1e-3, fused=True)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=1e-3)
    skipped = 0
    for attempt in range(10):
        batches = on(device, ragged(attempt, 4, 4))
        if attempt in (0, 5):
            batches[1][0][0, 0] = math.inf
        for x, y in batches:
            with manager.context():
                loss = F.cross_entropy(ours(x).float(), y)
            manager.backward(loss / len(batches))
            with torch.autocast(device, torch.float16):
                loss = F.cross_entropy(theirs(x).float(), y)
            scaler.scale(loss / len(batches)).backward()
        with no_host_reads(device) if attempt > 1 else contextlib.nullcontext():
            update = manager.step(ours, mine)
        scaler.unscale_(plain)
        nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
        skipped += update.skipped
        scales = (manager.loss_scale, scaler.get_scale())
        assert scales[0] == scales[1], f"scale {scales[0]}, GradScaler's {scales[1]}"
    assert skipped == 2, f"{skipped} updates skipped, 2 had a non-finite gradient"
    for name, one, other in zip(dict(ours.named_parameters()), ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    waited = ", no host read in step" if device == "cuda" else ""
    return f"scale path and parameters of a GradScaler loop, 2 of 10 skipped{waited}"


def check_skip(device: str) -> str:
    """Law 5, the first attempt: fused SGD with momentum after a skipped start equals a run without it."""
    models = [network().to(device) for _ in range(2)]
    for model, seeds in zip(models, ([3, 1, 2], [1, 2]), strict=True):
        manager = MixedPrecisionManager(precision="fp32", device=device, max_norm=MAX_NORM)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        for seed in seeds:
            ((x, y),) = on(device, ragged(seed, 4))
            if seed == 3:
                x[0] = math.nan
            manager.backward(F.cross_entropy(model(x), y))
            manager.step(model, optimizer)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), "parameters differ from those of a run without the skipped update"
    return "bit for bit a run without the skipped update"


def check_nothing_supervised(device: str) -> str:
    """Law 10: a micro-batch of weight 0 with a NaN loss contributes nothing."""
    model = network().to(device)
    kept = copy.deepcopy(model)
    (x, y), (nan, labels) = on(device, ragged(4, 4, 2))
    nan.fill_(math.nan)
    for net, batches in ((model, [(x, y), (nan, labels)]), (kept, [(x, y)])):
        manager = MixedPrecisionManager(precision="bf16", device=device)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for inputs, targets in batches:
            with manager.context():
                loss = F.cross_entropy(net(inputs).float(), targets)
            manager.backward(loss, weight=0 if inputs is nan else 4)
        manager.step(net, optimizer)
    for one, other in zip(model.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one, other), "a micro-batch of weight 0 left a trace"
    return "weight 0 with a NaN loss leaves no trace"


def check_island(device: str) -> str:
    """An island's gradients under autocast are those of an FP32 model, eager and compiled."""
    for compiled in (False, True):
        model, plain = network().to(device), network().to(device)
        keep_fp32(model, nn.Sequential)
        run: Callable[[Tensor], Tensor] = torch.compile(model, backend="aot_eager") if compiled else model
        ((x, y),) = on(device, ragged(5, 6))
        with torch.autocast(device, torch.bfloat16):
            out = run(x)
        assert out.dtype == torch.float32, f"outputs are {out.dtype}"
        F.cross_entropy(out, y).backward()
        F.cross_entropy(plain(x), y).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-7)
    return "FP32 gradients under autocast, eager and compiled"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    torch.set_float32_matmul_precision("highest")
    checks: dict[str, Callable[[], str]] = {
        f"gradient {precision}": lambda p=precision: check_gradient(device, p) for precision in TOLERANCES
    } | {
        "GradScaler": lambda: check_against_scaler(device),
        "skip": lambda: check_skip(device),
        "weight 0": lambda: check_nothing_supervised(device),
        "island": lambda: check_island(device),
    }
    failed = 0
    for name, check in checks.items():
        try:
            print(f"  right  {name:14} {check()}", flush=True)
        except Exception as error:  # every check is told, whatever the first one does
            failed += 1
            print(f"  WRONG  {name:14} {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
