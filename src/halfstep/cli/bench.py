"""``halfstep bench``: what each precision really costs on this device."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from halfstep.cli import options

if TYPE_CHECKING:
    from halfstep.probe.bench import Bench as Measured


class Bench:
    name = "bench"
    help = "what fp32, tf32, bf16 and fp16 really cost on this device, and which to choose"
    takes_script = False
    description = """\
Times matrix products, convolutions and attention, forward and backward under autocast, in every precision this device
has, within a budget of time; slow precisions are measured on small sizes. Ctrl-C shows what was reached.

  halfstep bench                      about 40 seconds
  halfstep bench --quick              about 10
  halfstep bench --device cpu --json bench.json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--device", metavar="DEVICE", help="default: the accelerator where there is one")
        how_long = parser.add_mutually_exclusive_group()
        how_long.add_argument("--seconds", metavar="S", type=_positive, default=40.0, help="the budget (default: 40)")
        how_long.add_argument("--quick", action="store_const", const=10.0, dest="seconds", help="--seconds 10")
        parser.add_argument("--json", metavar="FILE", type=options.file, help="write what was measured as JSON")

    def run(self, args: argparse.Namespace) -> int:
        from halfstep.cli.watched import write
        from halfstep.probe.bench import bench

        found: Measured | None = None
        status = 0
        try:
            for found in bench(args.device, args.seconds):
                _progress(found)
        except KeyboardInterrupt:
            status = 130
        if found is None:
            print("halfstep bench: interrupted before anything was measured", file=sys.stderr)
            return status
        _show(found)
        if args.json:
            write(args.json, json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n")
        return status


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number of seconds")
    return value


def _progress(found: Measured) -> None:
    """A line on stderr that is written over, where somebody looks."""
    if not sys.stderr.isatty():
        return
    last = found.cells[-1]
    end = "\r\x1b[K" if found.complete else ""
    print(f"\r\x1b[K{last.operation} in {last.precision} measured{end}", end="", file=sys.stderr, flush=True)


def _show(found: Measured) -> None:
    from rich.console import Console
    from rich.table import Table

    from halfstep.probe.operations import OPERATIONS

    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    console = Console(soft_wrap=True)
    head = f"{found.device} · {found.threads} threads · forward and backward, casts included"
    console.print(f"[bold]halfstep bench[/bold] · {head}", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="bold")
    for name in ("size", *found.precisions):
        table.add_column(name, justify="left" if name == "size" else "right")
    for operation in OPERATIONS:
        sizes = sorted({size for cell in found.cells if cell.operation == operation.name for size in cell.seconds})
        shown = [s for s in sizes if any(_compared(found, operation.name, name, s) for name in found.precisions)]
        for size in shown:
            cells = [_cell(found, operation.name, name, size) for name in found.precisions]
            table.add_row(operation.name if size == shown[0] else "", operation.shape(operation.sizes[size]), *cells)
        for cell in found.cells:
            if cell.operation == operation.name and not cell.seconds:
                table.add_row(operation.name, f"{cell.precision}: {cell.why_not}")
    console.print(table, highlight=False)
    if not found.complete:
        console.print("interrupted: the rest was not measured", style="yellow")
    for sentence in found.advice():
        console.print(f"→ {sentence}", highlight=False)


def _compared(found: Measured, operation: str, precision: str, size: int) -> bool:
    """Whether this is the size a precision is compared with FP32 at."""
    speed = found.speed(operation, precision)
    return speed is not None and speed[1] == size


def _cell(found: Measured, operation: str, precision: str, size: int) -> str:
    cell = found.cell(operation, precision)
    if cell is None or size not in cell.seconds:
        return "–"
    seconds = cell.seconds[size]
    time = f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"
    if precision == "fp32" or not _compared(found, operation, precision, size):
        return time
    speed = found.speed(operation, precision)
    assert speed is not None
    return f"{time} ({speed[0]:.2g}×)"
