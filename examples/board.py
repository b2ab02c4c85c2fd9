"""What the segmentation example shows: one row a run while it trains, then what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from halfstep.report.run_page import show_run

if TYPE_CHECKING:
    from segmentation import Training

_COLUMNS = ("precision", "applied", "skipped", "loss scale", "loss", "gradient norm", "examples/s", "validation IoU")


class Board:
    """A live table and a bar in a terminal; where the output is no terminal, one line a run and validation."""

    def __init__(self, trainings: Sequence[Training], updates: int, about: str) -> None:
        self.console = Console(highlight=False)
        self.trainings = trainings
        self.about = about
        self._bar = Progress(
            TextColumn("updates"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self._task = self._bar.add_task("updates", total=updates)
        self._live = Live(Group(self._table(), self._bar), console=self.console, refresh_per_second=4)

    def __enter__(self) -> Board:
        self.console.print(self.about)
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def show(self, done: int, validated: bool) -> None:
        """After ``done`` updates of every run. Reading an update's fields waits for the device."""
        if self.console.is_terminal:
            self._bar.update(self._task, completed=done)
            self._live.update(Group(self._table(), self._bar))
        elif validated:
            for training in self.trainings:
                row = zip(_COLUMNS, _row(training), strict=True)
                self.console.print("   ".join(f"{name} {value}" for name, value in row), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name == "precision" else "right")
        for training in self.trainings:
            table.add_row(*_row(training))
        return table

    def conclude(
        self, counted: Sequence[dict[str, int]], reports: Sequence[Any], aim: float | None, seconds: float
    ) -> None:
        """Quality, speed and memory side by side, then the record of each run."""
        names = [report["precision"]["used"] for report in reports]
        table = Table(title="measured in this run", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for name in [*names, *([f"{names[0]} against fp32"] if len(names) == 2 else [])]:
            table.add_column(name, justify="right")
        ious = [training.iou for training in self.trainings]
        rates = [training.examples_per_second for training in self.trainings]
        table.add_row("validation IoU", *(f"{iou:.4f}" for iou in ious), *_pair("{0:+.4f}", ious, minus=True))
        table.add_row(
            "examples per second (median update)", *(f"{rate:.0f}" for rate in rates), *_pair("× {0:.2f}", rates)
        )
        for what in counted[0]:
            sizes = [sizes[what] for sizes in counted]
            table.add_row(what, *(f"{size / 2**20:.2f} MiB" for size in sizes), *_pair("× {0:.2f}", sizes))
        for report in reports:
            self.console.print()
            show_run(report, self.console)
        self.console.print()
        self.console.print(table)
        verdict = ""
        if aim is not None:
            verdict = f"; the aim of {aim:.2f} is {'reached' if ious[0] >= aim else 'not reached'}"
        self.console.print(f"\nvalidation IoU {ious[0]:.3f} in {names[0]}{verdict}; {seconds:.0f} s in all")


def _row(training: Training) -> list[str]:
    update, manager = training.last, training.manager
    if update is None:
        return ["–"] * len(_COLUMNS)
    return [
        manager.precision.name,
        str(update.applied_updates),
        str(update.attempted_updates - update.applied_updates),
        f"{manager.loss_scale:g}" if manager.scaler.is_enabled() else "none",
        f"{update.loss:.4f}",
        f"{update.grad_norm:.3f}",
        f"{training.examples_per_second:.0f}",
        "–" if math.isnan(training.iou) else f"{training.iou:.4f}",
    ]


def _pair(text: str, values: Sequence[float], *, minus: bool = False) -> list[str]:
    if len(values) != 2:
        return []
    return [text.format(values[0] - values[1] if minus else values[0] / values[1])]
