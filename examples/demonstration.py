"""Four ordinary training loops under the doctor, and the gradient each hands to its optimizer.

    python examples/demonstration.py [--only NAME]

For each script: what `halfstep run` says (rule, line, number, fix), and how far the gradient of its first update is
from the FP64 gradient of the same sentences in one big batch; then the same for the mended script beside it, on which
the doctor is silent. Needs accelerate, lightning and transformers; a script whose library is missing is passed over.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent / "demonstration"
SCRIPTS = {
    "accelerate_loop": "accelerate",
    "lightning_trainer": "lightning",
    "transformers_loop": "transformers",
    "tutorial_fp16": None,
}


@dataclass
class Result:
    """`error`: |g - reference| / |reference| of the first update's gradient, as the optimizer received it."""

    name: str
    findings: list[dict[str, Any]]
    error: float


def diagnose(name: str) -> list[dict[str, Any]]:
    """The errors and warnings of `halfstep run`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", "halfstep", "run", "--json", str(out), str(HERE / f"{name}.py")],
            check=True,
            capture_output=True,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
        )
        return [f for f in json.loads(out.read_text())["findings"] if f["severity"] != "info"]


class _CaughtError(Exception):
    pass


def first_gradient(name: str) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """Run the script's `main` up to its first update: the gradients there, and the model with its first weights."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    module = importlib.import_module(name)
    grads: list[torch.Tensor] = []
    owners: list[Any] = []

    def catch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads.extend(p.grad.detach().clone() for p in parameters)
        owners.extend(parameters)
        raise _CaughtError

    made: list[torch.nn.Module] = []
    init = torch.nn.Module.__init__

    def remember(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    handle = register_optimizer_step_pre_hook(catch)
    torch.nn.Module.__init__ = remember  # type: ignore[method-assign]
    try:
        module.main()
    except _CaughtError:
        pass
    finally:
        handle.remove()
        torch.nn.Module.__init__ = init  # type: ignore[method-assign]
    wanted = {id(p) for p in owners}
    model = next(m for m in made if {id(p) for p in m.parameters()} == wanted and not hasattr(m, "training_step"))
    order = {id(p): g for p, g in zip(owners, grads, strict=True)}
    return [order[id(p)] for p in model.parameters()], model


def reference(model: torch.nn.Module, clip: float | None) -> list[torch.Tensor]:
    """The FP64 gradient of the mean loss over every token of the first group, clipped as the script means to."""
    from sentences import GROUP, VOCAB, micro_batches

    model = model.double()
    model.zero_grad(set_to_none=True)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in micro_batches()[:GROUP]:
        out = model(batch["input_ids"])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        targets = batch["labels"][:, 1:].reshape(-1)
        total = total + torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCAB), targets, reduction="sum", ignore_index=-100
        )
        tokens += int((targets != -100).sum())
    (total / tokens).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradient_error(name: str) -> float:
    grads, model = first_gradient(name)
    right = reference(model, 1.0 if name.startswith("tutorial") else None)
    far = sum(float((g.double() - r).pow(2).sum()) for g, r in zip(grads, right, strict=True))
    return float((far / sum(float(r.pow(2).sum()) for r in right)) ** 0.5)


def available(library: str | None) -> bool:
    return library is None or importlib.util.find_spec(library) is not None


def run(only: str = "") -> list[tuple[Result, Result]]:
    """Each script as it is usually written, and as it is right."""
    sys.path.insert(0, str(HERE))
    out = []
    for name, library in SCRIPTS.items():
        if only in name and available(library):
            pair = [Result(n, diagnose(n), gradient_error(n)) for n in (name, f"{name}_right")]
            out.append((pair[0], pair[1]))
    return out


def show(results: list[tuple[Result, Result]], console: Console) -> None:
    table = Table(title="Four ordinary loops, their gradient against the FP64 big batch", title_justify="left")
    for column in ("script", "finding", "gradient error", "mended", "gradient error"):
        table.add_column(column, justify="right" if "error" in column else "left", overflow="fold")
    for usual, right in results:
        found = "\n".join(f"{f['rule']} at line {f['line']}\n{f['message']}\nfix: {f['fix']}" for f in usual.findings)
        silence = "\n".join(f["rule"] for f in right.findings) or "silence"
        table.add_row(f"{usual.name}.py", found or "silence", f"{usual.error:.1%}", silence, f"{right.error:.1e}")
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="only the scripts whose name holds this")
    show(run(parser.parse_args().only), Console())
