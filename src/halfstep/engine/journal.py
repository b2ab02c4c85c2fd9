"""The run as data: one plain row an update, its scale, metrics and notes; bounded however long the run.

A sink (a run directory, a stream) may follow: it is called with every row, plain and JSON-able, as it is written.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import PolicyError, RecordError
from halfstep.events import plain

COLUMNS = 2000  # updates of which per-layer norms are kept; every second one is dropped when there are more
ROWS = 20_000  # updates kept whole in memory; counters and the record cover all
WINDOW = 1000  # updates the moving percentiles look at

FIELDS = (
    "attempted_updates",
    "applied_updates",
    "outcome",
    "loss",
    "scale",
    "grad_norm",
    "clip_coefficient",
    "weight",
    "micro_batches",
    "examples",
    "lr",
)

Sink = Callable[[dict[str, Any]], None]


class Lines:
    """A sink: ``journal.jsonl`` in a directory, ``journal-rank3.jsonl`` where this process is rank 3; appended to.

    Each row is one write to the operating system, made when it comes: what is on disk when the process is killed is
    whole up to the last update whose outcome is known. (A machine that loses power may lose the last seconds.)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Any = None
        self._ended = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error) from error
        if not os.access(folder, os.W_OK):
            raise self._refused("permission denied")

    def __call__(self, row: dict[str, Any]) -> None:
        if self._ended:
            return
        if self._file is None:
            self._file = self._open()
        try:
            self._file.write((json.dumps(plain(row), default=str) + "\n").encode())
        except OSError as error:  # a full disk must not end the run between an update and its schedule
            self._ended = True
            warnings.warn(f"halfstep: the journal in {self.folder} ends here: {error}", stacklevel=2)

    def _open(self) -> Any:
        """At the first row: a manager may be made before its process knows its rank."""
        number = rank()
        try:
            return open(self.folder / (f"journal-rank{number}.jsonl" if number else "journal.jsonl"), "ab", buffering=0)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, why: object) -> RecordError:
        return RecordError(f"cannot write a journal in {self.folder}: {why}", "name a folder that can be written")


def rank() -> int:
    """This process's rank among those that a launcher started; 0 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    value = os.environ.get("RANK", "")
    return int(value) if value.isdigit() and "WORLD_SIZE" in os.environ else 0


def sink_of(record: Sink | str | os.PathLike[str] | None) -> Sink | None:
    """``record`` as given to the manager -> where rows go."""
    if record is None or callable(record):
        return record
    if isinstance(record, (str, os.PathLike)):
        return Lines(Path(record))
    raise PolicyError(f"record={record!r} is no place for a record", "a directory, or a function that takes a dict")


class Journal:
    """Rows of updates, notes and metrics, in memory."""

    def __init__(self, sink: Sink | None = None) -> None:
        self.sink = sink
        self.updates: deque[tuple[Any, ...]] = deque(maxlen=ROWS)
        self.metrics: deque[dict[str, Any]] = deque(maxlen=ROWS)
        self.notes: list[dict[str, Any]] = []
        self.layers: list[tuple[int, list[str], Tensor, float]] = []
        self.stride = 1
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._sorted: list[float] | None = None

    def update(self, row: tuple[Any, ...], names: list[str], norms: Tensor | None, divisor: float) -> None:
        """Keep an update's row (``FIELDS``). ``norms`` (one a name, undivided): kept for every ``stride``-th update."""
        self.updates.append(row)
        if row[2] == "applied" and row[5] == row[5]:  # measured
            self._norms.append(row[5])
            self._sorted = None
        number = row[0]
        if norms is not None and number % self.stride == 0:
            self.layers.append((number, names, norms, divisor))
            if len(self.layers) > COLUMNS:
                self.stride *= 2
                self.layers = [column for column in self.layers if column[0] % self.stride == 0]
        if self.sink is not None:
            self.sink({"kind": "update", **dict(zip(FIELDS, row, strict=True))})

    def log(self, applied_updates: int, metrics: dict[str, Any]) -> None:
        """Keep metrics, plain already."""
        row = {"applied_updates": applied_updates, **metrics}
        self.metrics.append(row)
        if self.sink is not None:
            self.sink({"kind": "metrics", **row})

    def note(self, kind: str, message: str, **numbers: Any) -> None:
        """Something a reader should know. The same kind and message is kept once, with a count."""
        for note in self.notes:
            if note["note"] == kind and note["message"] == message:
                note["count"] += 1
                return
        row = {"note": kind, "message": message, "count": 1, **numbers}
        self.notes.append(row)
        if self.sink is not None:
            self.sink({"kind": "note", **row})

    def thinned(self) -> list[tuple[Any, ...]]:
        """At most 2000 of the rows, evenly, the last one among them."""
        rows = list(self.updates)
        step = -(-len(rows) // COLUMNS) or 1
        return rows[::-step][::-1]

    def percentiles(self) -> dict[str, float] | None:
        """Of the gradient's norm over the last 1000 applied updates; None before the first."""
        if not self._norms:
            return None
        if self._sorted is None:
            self._sorted = sorted(self._norms)
        values = self._sorted
        return {f"p{p}": values[min(len(values) - 1, round(p / 100 * (len(values) - 1)))] for p in (10, 50, 90, 95, 99)}

    def suggestion(self) -> float | None:
        """A ``max_norm`` that clips one update in ten; None before ten were measured."""
        percentiles = self.percentiles() if len(self._norms) >= 10 else None
        return None if percentiles is None else percentiles["p90"]

    def window(self) -> list[float]:
        return list(self._norms)

    def resumed(self, attempted_updates: int, applied_updates: int) -> None:
        """A state was loaded: of the rows before this one, those of later updates are of an attempt that was lost."""
        if self.sink is not None:
            self.sink({"kind": "resumed", "attempted_updates": attempted_updates, "applied_updates": applied_updates})

    def load_window(self, norms: list[float]) -> None:
        self._norms = deque(norms, maxlen=WINDOW)
        self._sorted = None

    def layer_norms(self) -> list[tuple[int, dict[str, float]]]:
        """(attempted update, name -> norm) of the columns kept."""
        return [
            (number, dict(zip(names, [norm / divisor for norm in norms.tolist()], strict=True)))
            for number, names, norms, divisor in self.layers
        ]
