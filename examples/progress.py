"""What the language-model example shows: a bar while it trains, then what was reached, and the table of splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.console import Console
from rich.table import Table

from halfstep.report.run_page import show_run

if TYPE_CHECKING:
    from halfstep import Update


class Progress:
    """A bar in a terminal; where the output is no terminal, one line a validation. ``quiet``: another rank speaks."""

    def __init__(self, about: str, updates: int, *, quiet: bool) -> None:
        self.console = Console(highlight=False, quiet=quiet)
        self.about = about
        self._bar = progress.Progress(
            progress.TextColumn("updates"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=updates)

    def __enter__(self) -> Progress:
        self.console.print(self.about)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: int, loss: float, update: Update, bits: float, validated: bool) -> None:
        """After ``done`` updates. Reading an update's fields waits for the device."""
        if self._bar.disable and not validated:
            return
        words = f"loss {loss:.4f}   gradient norm {update.grad_norm:.3f}"
        if bits == bits:
            words += f"   held out {bits:.3f} bits a byte"
        if self._bar.disable:
            self.console.print(f"update {done:4d}   {words}", soft_wrap=True)
        else:
            self._bar.update(self._task, completed=done, description=words)


def conclude(runs: Sequence[dict[str, Any]], *, table: bool, brief: bool) -> None:
    """The table where several splits were asked for, else the record of the run, unless ``brief``."""
    console = Console(highlight=False)
    if table or len(runs) > 1:
        console.print(split_table(runs))
        return
    (run,) = runs
    if not brief:
        show_run(run["record"], console)
        console.print()
    console.print(f"held out: {run['bits_per_byte']:.3f} bits a byte; {run['seconds']:.0f} s in all")


def split_table(runs: Sequence[dict[str, Any]]) -> Table:
    """Losses by split; the last column is the largest relative gap, over all updates, to the first of equal batches."""
    table = Table(box=None, pad_edge=False)
    for name in ("m", "A", "D", "documents an update", "loss 1", f"loss {len(runs[0]['losses'])}", "largest gap"):
        table.add_column(name, justify="right")
    first: dict[int, list[float]] = {}
    for run in runs:
        effective = run["m"] * run["A"] * run["D"]
        compared = first.setdefault(effective, run["losses"])
        gap = max(abs(a - b) / abs(b) for a, b in zip(run["losses"], compared, strict=True))
        losses = [f"{run['losses'][which]:.6f}" for which in (0, -1)]
        shown = "–" if compared is run["losses"] else f"{gap:.0e}"
        table.add_row(*(str(run[name]) for name in "mAD"), str(effective), *losses, shown)
    return table
