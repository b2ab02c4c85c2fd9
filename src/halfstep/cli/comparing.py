"""What `halfstep compare` does around its two runs: begin them, show how far they are, judge, report."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from halfstep.cli import ranks
from halfstep.cli.watched import _keep
from halfstep.errors import PolicyError
from halfstep.launch import Target
from halfstep.probe.runs.criterion import Criterion
from halfstep.probe.runs.pair import Account, Process, forget, read, wait
from halfstep.probe.runs.parting import TOLERANCES
from halfstep.probe.runs.side import SIDES, TOLD
from halfstep.probe.runs.verdict import Comparison, judge
from halfstep.report.comparison import NAMES

if TYPE_CHECKING:
    from rich.progress import Progress

STATUS = {"not precision": 0, "precision": 3, "unknown": 4}
_WIDTH = 120  # of tables where no terminal has one
_FURTHER = 10  # updates that FP32 goes past one at which the script as it is failed


class Stopped(BaseException):
    """A signal that ends the comparison: both runs end, and what was reached is told."""

    def __init__(self, number: int) -> None:
        self.number = number


def compare(args: argparse.Namespace) -> int:
    """Run, judge, report; the exit status."""
    try:
        _refuse(args.target)
        tolerance, share = args.tolerance or (None, False)
        criterion = Criterion(args.metric, tolerance, share, args.better)
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
    except (PolicyError, OSError) as error:  # python's top level, which sees what a script raises, is not for ours
        print(f"halfstep compare: {error}", file=sys.stderr)
        return 2
    if args.keep is not None:
        return _compare(args, criterion, args.keep)
    with tempfile.TemporaryDirectory(prefix="halfstep-") as folder:
        return _compare(args, criterion, Path(folder))


def _refuse(target: Target) -> None:
    if target.kind == "stdin":
        raise PolicyError("a script from standard input can be read only once, and is to run twice", "name a file")
    if ranks.standing() is not None:
        raise PolicyError(
            "compare was started by a launcher, as one of several processes: it starts its own two",
            "halfstep compare SCRIPT, without the launcher",
        )

    if target.kind == "script":
        path = Path(target.value)
        if not path.exists():
            raise PolicyError(f"there is no file {target.value}", "name the script that trains")
        if path.is_dir() and not (path / "__main__.py").exists():
            raise PolicyError(f"the folder {target.value} has no __main__.py", "name the script that trains")
    if target.kind == "module" and not _is_there(target.value.partition(".")[0]):
        raise PolicyError(f"there is no module {target.value}", "name one that python -m finds from this folder")


def _is_there(name: str) -> bool:
    """Whether python finds a module of this name, here first; nothing is imported."""
    if not name or name in sys.builtin_module_names:
        return bool(name)
    path = [os.getcwd(), *sys.path]
    if importlib.machinery.PathFinder.find_spec(name, path) is not None:
        return True
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return any(finder.find_spec(name, None) is not None for finder in finders)


def _compare(args: argparse.Namespace, criterion: Criterion, folder: Path) -> int:
    from rich.console import Console

    from halfstep.probe.runs.beside import document
    from halfstep.report.comparison import show_comparison
    from halfstep.report.document import dump

    for side in SIDES:
        forget(folder / side)
    stopped = None
    try:
        with _signals(), _progress(args.updates) as told:
            _run(args, folder, told)
            while not args.twice and (wanted := _judged(folder, criterion).wanted) is not None:
                _further(args, folder, criterion, wanted, told)
    except Stopped as stop:
        stopped = stop.number
    comparison = _judged(folder, criterion)
    status = STATUS[comparison.blame] if stopped is None else 128 + stopped
    doc = document(comparison, " ".join([args.target.value, *args.target.argv]), status)
    if args.json is not None:
        from halfstep.events import plain

        _keep(args.json, dump(plain(doc)))
    if args.html is not None:
        from halfstep.report.comparison_page import comparison_page

        _keep(args.html, comparison_page(doc))
    if stopped is not None:
        name = signal.Signals(stopped).name
        print(f"halfstep compare: {name}: all runs have ended; what was reached is compared", file=sys.stderr)
    show_comparison(doc, Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH))
    return status


def _judged(folder: Path, criterion: Criterion) -> Comparison:
    """What the runs that were made so far say."""
    made = {side: read(side, folder / side, criterion.metric) for side in SIDES if (folder / side / TOLD).exists()}
    own, fp32 = made.get("own") or Account("own"), made.get("fp32") or Account("fp32")
    return judge(criterion, own, fp32, made.get("scaled"), made.get("jittered"))


def _further(
    args: argparse.Namespace, folder: Path, criterion: Criterion, side: str, told: Callable[[list[Process]], None]
) -> None:
    """One more run, which decides; one that tells nothing is made once only."""
    before = _judged(folder, criterion)
    jitter = TOLERANCES[before.dtype] if side == "jittered" else 0.0
    updates = _limit(before.own, args.updates)
    process = Process(side, folder / side, args.target, seed=args.seed, updates=updates, jitter=jitter)
    wait([process], lambda: told([process]))
    if _judged(folder, criterion).wanted == side:
        args.twice = True


def _run(args: argparse.Namespace, folder: Path, told: Callable[[list[Process]], None]) -> None:
    """The two runs, one after the other or at once."""

    def begin(side: str, updates: int | None) -> Process:
        return Process(side, folder / side, args.target, seed=args.seed, updates=updates)

    if args.together:
        both: list[Process] = []
        try:
            both.extend(begin(side, args.updates) for side in SIDES[:2])
        except BaseException:
            for process in both:
                process.end()
            raise
        wait(both, lambda: told(both))
        return
    first = begin("own", args.updates)
    wait([first], lambda: told([first]))
    own = read("own", folder / "own")
    if not own.points and own.raised is None:
        return  # wrong arguments, say: a second run would tell no more
    second = begin("fp32", _limit(own, args.updates))
    wait([second], lambda: told([second]))


def _limit(own: Account, updates: int | None) -> int | None:
    """How far the others need go where the script as it is did not come to its end."""
    if own.raised is None:
        return updates
    reached = len(own.points) + max(_FURTHER, len(own.points) // 4)
    return reached if updates is None else min(updates, reached)


@contextmanager
def _signals() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(updates: int | None) -> Iterator[Callable[[list[Process]], None]]:
    """How far each run is, on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda processes: None
        return
    words = "[progress.description]{task.description}", "{task.completed:,.0f} updates"
    with Progress(
        TextColumn(words[0]), BarColumn(), TextColumn(words[1]), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        yield _Bars(progress, updates)


class _Bars:
    """A bar a run; how far the first came is how far the others have to go, where nothing else says so."""

    def __init__(self, progress: Progress, updates: int | None) -> None:
        self._progress = progress
        self._total = updates
        self._first = 0
        self._tasks: dict[str, Any] = {}

    def __call__(self, processes: list[Process]) -> None:
        for process in processes:
            if process.side not in self._tasks:
                if len(processes) == 1 and self._total is None:
                    self._total = self._first or None
                self._tasks[process.side] = self._progress.add_task(NAMES[process.side], total=self._total)
            reached = process.reached()
            if process.side == "own":
                self._first = reached
            total = reached if process.is_over() else None
            self._progress.update(self._tasks[process.side], completed=reached, total=total)


__all__ = ["STATUS", "compare"]
