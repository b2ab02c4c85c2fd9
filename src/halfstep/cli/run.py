"""``halfstep run``: run a training script unchanged, and say what is wrong with its updates."""

from __future__ import annotations

import argparse

from halfstep import launch
from halfstep.cli import options


class Run:
    name = "run"
    help = "run a training script unchanged, and say what is wrong with its updates"
    takes_script = True
    description = """\
Runs a script exactly as python would, watches its optimizer updates, and writes what it found to stderr once the
script has ended: the rule, the line, the numbers seen, the fix. The script's output and exit status stay its own.

  halfstep run train.py --epochs 3            options after the script are the script's
  halfstep run --updates 20 train.py          stop after 20 applied updates: enough to judge most runs
  halfstep run --json found.json -m package.train
  halfstep run --fail-on error train.py       for CI: exit status 3 when an error was found
  torchrun --nproc-per-node 2 -m halfstep run train.py

exit status: the script's own; 2 for a wrong use of this command; 3 by --fail-on, only after a run that ended well."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "halfstep run [options] [--] SCRIPT [ARGS…]   (or -m MODULE, -c CODE)"
        parser.add_argument("--json", metavar="FILE", type=options.file, help="write the findings as JSON")
        parser.add_argument("--html", metavar="FILE", type=options.file, help="write the report as one HTML file")
        parser.add_argument(
            "--record", metavar="DIR", type=options.folder, help="keep the run's record, for halfstep report"
        )
        parser.add_argument(
            "--updates", metavar="N", type=options.updates, help="stop after N applied updates, with the report"
        )
        parser.add_argument(
            "--fail-on",
            choices=("error", "warning", "never"),
            default="never",
            help="exit with status 3 when a finding is at least this grave (default: never)",
        )
        # Run without the watch: tells whether it is halfstep that changes a run.
        parser.add_argument("--unwatched", action="store_true", help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace) -> int:
        # First, so that torch too is imported from where the script would import it.
        launch.settle(args.target)
        if args.unwatched:
            return launch.launch(args.target, Silence())
        from halfstep.cli.watched import Watched

        hooks = Watched(json=args.json, html=args.html, record=args.record, updates=args.updates, fail_on=args.fail_on)
        return launch.launch(args.target, hooks, verdict=args.fail_on != "never")


class Silence:
    """Hooks that see and say nothing."""

    def before(self, target: launch.Target) -> None: ...
    def raised(self, exc: BaseException) -> None: ...
    def finish(self, code: int | None, by: str) -> int | None:
        return None

    def on_fork(self) -> launch.Hooks | None:
        return None
