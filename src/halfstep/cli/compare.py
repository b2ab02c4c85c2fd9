"""``halfstep compare``: the same script as it is and in FP32, side by side: is precision to blame?"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from halfstep import launch
from halfstep.cli import options


class Compare:
    name = "compare"
    help = "run a script as it is and in FP32, side by side: is precision to blame?"
    takes_script = True
    description = """\
Runs a script twice, each time in a process of its own and under the watch of `halfstep run`: as it is, then in FP32
(autocast, scalers and casts to half undone; same seeds, same data), and says whether precision is to blame for what
came of it, where the two part, and in which layer. Where FP32 ends better, a further run decides: whether that is more
than chance (FP32 with random errors as large as rounding's in every gradient), and, where the doctor finds the loss
scale mishandled, whether that explains it (FP32 with the scaler left on).

  halfstep compare --updates 200 train.py             the first 200 attempted updates of each
  halfstep compare train.py --epochs 3                options after the script are the script's
  halfstep compare --metric val_acc --better higher --tolerance 0.01 train.py
                                                      judged by a number that the script prints ("val_acc: 0.91") or
                                                      gives to manager.log; fixed before anything runs
  halfstep compare --json both.json --html both.html train.py

What the script prints goes to files (--keep DIR keeps them), never among the report, which goes to stdout; progress to
stderr. Every run writes what the script writes, the later over the earlier, unless the script asks the environment
variable HALFSTEP_COMPARE, which says "own", "fp32", "scaled" or "jittered". Standard input is empty in all of them.

exit status: 0 precision is not to blame; 3 it is; 4 it cannot be said; 2 for a wrong use; 130 after Ctrl-C, which ends
all runs and compares what was reached."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "halfstep compare [options] [--] SCRIPT [ARGS…]   (or -m MODULE, -c CODE)"
        parser.add_argument(
            "--updates", metavar="N", type=options.updates, help="end each run after N attempted updates"
        )
        parser.add_argument(
            "--metric",
            metavar="NAME",
            type=_name,
            default="loss",
            help="what is judged: loss (the default), grad_norm, or a number the script prints or logs",
        )
        parser.add_argument(
            "--tolerance",
            metavar="T",
            type=_tolerance,
            help="how far apart the two may end: 0.01, or 2%% of FP32's value (default: 2%%; for the loss also 2%% of "
            "what FP32 gained and the batches' own noise, whichever is most)",
        )
        parser.add_argument(
            "--better",
            choices=("higher", "lower"),
            help="which way the number is better: FP32's must be for precision to be to blame (the loss: lower; any "
            "other, unless it is said: every difference counts)",
        )
        parser.add_argument("--seed", metavar="S", type=_seed, default=0, help="of both runs, before the script's (0)")
        parser.add_argument("--together", action="store_true", help="run the two at once, not one after the other")
        parser.add_argument("--keep", metavar="DIR", type=options.folder, help="keep what the runs printed and told")
        parser.add_argument("--json", metavar="FILE", type=options.file, help="write the comparison as JSON")
        parser.add_argument("--html", metavar="FILE", type=options.file, help="write the comparison as one HTML file")
        parser.add_argument("--twice", action="store_true", help="never a further run, even where it would decide")
        # One of the runs.
        parser.add_argument("--side", help=argparse.SUPPRESS)
        parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
        parser.add_argument("--jitter", type=float, default=0.0, help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace) -> int:
        if args.side:
            launch.settle(args.target)
            from halfstep.probe.runs.side import Side

            side = Side(args.side, args.told, seed=args.seed, updates=args.updates, jitter=args.jitter)
            return launch.launch(args.target, side)
        from halfstep.cli.comparing import compare

        return compare(args)


def _seed(text: str) -> int:
    """What torch, random and NumPy all take."""
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is no seed (0 to 2^32-1)")
    return int(text)


def _name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a number needs a name: loss, grad_norm, or what the script prints or logs")
    return text.strip()


def _tolerance(text: str) -> tuple[float, bool]:
    """(number, whether it is a share of FP32's value)."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no distance (0.01, or 2%)")
    return (number / 100.0, True) if text.endswith("%") else (number, False)
