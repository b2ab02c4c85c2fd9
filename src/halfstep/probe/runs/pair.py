"""The processes of a comparison: begun, awaited, ended; what they told, read back. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.launch import Target
from halfstep.probe.runs.side import REACHED, TOLD

_HOME = str(Path(__file__).resolve().parents[2])
# Imported before the working directory is put where `python -c` has it: a file there must not pass for one of ours.
_BEGIN = f"""
import sys
first = [] if sys.flags.safe_path else [sys.path.pop(0)]
sys.path.append({_HOME!r})
import halfstep.cli.compare, halfstep.cli.target, halfstep.probe.runs.side
sys.path.pop()
sys.path[:0] = first
sys.exit(halfstep.cli.main())
"""
OUTPUT = "output.txt"
_GRACE = 10.0  # seconds that a run has to end by itself after Ctrl-C, then again after SIGTERM
_ROUND = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """One attempted update as a run told it; see `halfstep.record.history.Row`. ``micro``: backwards so far.

    ``layers``: layer -> norm of its unscaled gradient, where it was sampled. ``data``: whole-number projection,
    floating-point projection, norm of the latter. ``weights``: layer -> norm of its parameters, before the first.
    """

    optimizer: int
    micro: int
    attempted: int
    applied: int
    outcome: str
    loss: float | None = None
    norm: float | None = None
    scale: float | None = None
    lr: float | None = None
    position: int | None = None
    random: int | None = None
    data: tuple[float, float, float] | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Account:
    """All that one run told. ``metrics``: the numbers logged by a manager or found in the output, in order.

    ``end`` is None where the run was cut short; ``raised``: the exception that ended it; ``halves``: half dtypes seen;
    ``verdict``: what the watch made of it; ``output``: file of its stdout and stderr.
    """

    side: str
    points: list[Point] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    halves: list[str] = field(default_factory=list)
    half_parameters: int = 0
    raised: Mapping[str, Any] | None = None
    verdict: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    output: Path | None = None

    @property
    def status(self) -> int | None:
        """The exit status as the run itself told it; None where it was cut short."""
        return None if self.end is None else self.end.get("code")


class Process:
    """One run, in a process group of its own: a Ctrl-C reaches it only through `end`."""

    def __init__(
        self, side: str, folder: Path, target: Target, *, seed: int, updates: int | None, jitter: float = 0.0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.side = side
        self.folder = folder
        self.output = folder / OUTPUT
        limit = [] if updates is None else ["--updates", str(updates)]
        words = ["compare", "--side", side, "--told", str(folder.resolve()), "--seed", str(seed), *limit]
        words += ["--jitter", repr(jitter)] if jitter else []
        words += ["--", target.value] if target.kind == "script" else [f"-{target.kind[0]}", target.value]
        python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
        # Sets and dictionaries of strings in one order in both; else all is the caller's, threads included.
        own = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), "HALFSTEP_COMPARE": side}
        with open(self.output, "wb") as output:
            self._process = subprocess.Popen(
                [*python, "-c", _BEGIN, *words, *target.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
                start_new_session=True,
            )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def reached(self) -> int:
        """Attempted updates so far."""
        try:
            return int.from_bytes((self.folder / REACHED).read_bytes()[:8], "little")
        except OSError:
            return 0

    def end(self) -> None:
        """End it and what it has started: by Ctrl-C, that it may tell what it saw; then by force."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if number == signal.SIGINT:
                if self.is_over():
                    break
                self._process.send_signal(number)
            else:
                self._signal_all(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
                break
        self._signal_all(signal.SIGKILL)
        self._process.wait()

    def _signal_all(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def wait(processes: Sequence[Process], told: Callable[[], None]) -> None:
    """Until all have ended; ``told`` is called meanwhile. Whatever it raises (Ctrl-C too) leaves all of them ended."""
    try:
        while not all(process.is_over() for process in processes):
            told()
            time.sleep(_ROUND)
        told()
    except BaseException:
        for process in processes:
            process.end()
        raise


def forget(folder: Path) -> None:
    """Take away what a run of an earlier comparison left there, and nothing else."""
    for name in (TOLD, REACHED, OUTPUT):
        (folder / name).unlink(missing_ok=True)


def read(side: str, folder: Path, metric: str | None = None) -> Account:
    """What the run in this folder told, as far as it came. ``metric``: looked for in its output, too."""
    account = Account(side, output=folder / OUTPUT)
    for line in _lines(folder / TOLD):
        kind = line.pop("kind", "")
        if kind == "update":
            data = line.pop("data", None)
            account.points.append(Point(**line, data=None if data is None else tuple(data)))
        elif kind == "metric":
            account.metrics.setdefault(line["name"], []).append(line["value"])
        elif kind == "half":
            account.halves.append(line["dtype"])
        elif kind == "half parameters":
            account.half_parameters += sum(line["dtypes"].values())
        elif kind == "raised":
            account.raised = line
        elif kind == "verdict":
            account.verdict = line
        elif kind == "end":
            account.end = line
    if metric is not None and metric not in account.metrics:
        found = numbers(metric, tail(account.output, None))
        if found:
            account.metrics[metric] = found
    return account


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError), open(path, encoding="utf-8") as file:
        for text in file:
            try:
                yield json.loads(text)
            except ValueError:
                return  # the last line of a killed run


def numbers(name: str, text: str) -> list[float]:
    """The numbers that a text gives for a name: "acc: 0.91", "acc=91.2%" (0.912), '"acc": 0.91', "steps: 1,200"."""
    thousands = r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\d)"
    plain = r"\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?"
    value = rf"([-+]?(?:{thousands}|{plain})\b)\s*(%?)"
    pattern = rf"(?<![\w.]){re.escape(name)}[\"']?\s*[:=]?\s*{value}"
    return [
        float(n.replace(",", "")) / (100.0 if percent else 1.0)
        for n, percent in re.findall(pattern, text, re.IGNORECASE)
    ]


def tail(path: Path | None, size: int | None = 2000) -> str:
    """The end of a file of output (``size`` bytes of it; None: all)."""
    if path is None or not path.is_file():
        return ""
    with open(path, "rb") as file:
        if size is not None:
            file.seek(max(0, path.stat().st_size - size))
        return file.read().decode("utf-8", "replace")
