"""The command line. One small class a subcommand: the file ``cli/NAME.py`` holds the class ``Name``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Protocol

from halfstep.errors import HalfstepError, PolicyError

# In the order the help shows them; a name whose file is not there is passed over.
NAMES = ("run", "compare", "report", "plan", "bench", "explain")


class Subcommand(Protocol):
    """One verb of the command line.

    ``help`` is a line for the table, ``description`` teaches with examples. ``takes_script``: the arguments end in
    ``SCRIPT [ARGS…]``, ``-m MODULE`` or ``-c CODE``, which arrive as ``args.target``, a `halfstep.launch.Target`.
    ``run`` returns the exit status; whatever is heavy (torch, rich) is imported inside it.
    """

    name: str
    help: str
    description: str
    takes_script: bool

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def subcommands() -> dict[str, Subcommand]:
    """Every subcommand by its name, in the order of the help."""
    return {name: load(name) for name in NAMES if importlib.util.find_spec(f"{__name__}.{name}")}


def load(name: str) -> Subcommand:
    made: Subcommand = getattr(importlib.import_module(f"{__name__}.{name}"), name.capitalize())()
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv[1:]``); returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name not in NAMES or not importlib.util.find_spec(f"{__name__}.{name}"):
        return _top(words)
    command = load(name)
    parser = argparse.ArgumentParser(
        prog=f"halfstep {name}",
        description=command.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    words, target = words[1:], None
    if command.takes_script:
        from halfstep.cli.target import add_target, split

        add_target(parser)
        words, target = split(words, parser)
    args = parser.parse_args(words)
    if command.takes_script:
        if target is None:
            parser.error("nothing to run: give a script, -m MODULE or -c CODE")
        args.target = target
        # Nothing is caught here: what the script raises must reach python's own top level.
        return command.run(args)
    try:
        return command.run(args)
    except HalfstepError as error:
        print(f"halfstep {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, PolicyError) else 1


def _top(words: list[str]) -> int:
    """``halfstep`` without a subcommand: the table, the version, or what was wrong."""
    lines = [f"  {name:9}{command.help}" for name, command in subcommands().items()]
    parser = argparse.ArgumentParser(
        prog="halfstep",
        usage="halfstep COMMAND …",
        description="Every optimizer update, exactly the one you meant.\n\n" + "\n".join(lines),
        epilog="halfstep COMMAND --help explains each, with examples. Start with:  halfstep run train.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    known = {"-h", "--help", "--version"}
    if words and words[0] not in known:
        hint = f"; to watch a script: halfstep run {words[0]}" if words[0].endswith(".py") else ""
        parser.error(f"no command {words[0]!r}{hint}")
    args = parser.parse_args(words)
    if args.version:
        from importlib.metadata import version

        print(f"halfstep {version('halfstep')}")
        return 0
    parser.print_help(sys.stderr)
    return 2
