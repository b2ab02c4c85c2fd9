"""``halfstep report``: judge and show the records of runs, finished or killed."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfstep.cli import options


class Report:
    name = "report"
    help = "show the record of a run again, in the terminal, as JSON or as one HTML file"
    takes_script = False
    description = """\
Judges the events kept by `halfstep run --record DIR` and shows them; works on the record of a run that was killed.

  halfstep report DIR
  halfstep report DIR --html report.html --json found.json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("records", nargs="+", metavar="RECORD", type=Path, help="a folder written by --record")
        parser.add_argument(
            "--json", metavar="FILE", type=options.file, help="write the findings as JSON (one record only)"
        )
        parser.add_argument("--html", metavar="FILE", type=options.file, help="write one HTML file (one record only)")

    def run(self, args: argparse.Namespace) -> int:
        from rich.console import Console

        from halfstep.cli.watched import write
        from halfstep.errors import PolicyError
        from halfstep.report.document import document, dump
        from halfstep.report.page import page
        from halfstep.report.replay import replay
        from halfstep.report.terminal import show

        if len(args.records) > 1 and (args.json or args.html):
            raise PolicyError("--json and --html hold one record", "name one record, or call once for each")
        console = Console()
        for folder in args.records:
            run = replay(folder)
            if len(args.records) > 1:
                console.rule(str(folder))
            show(run.findings, run.summary, console)
            if args.json:
                write(args.json, dump(document(run.findings, run.summary, run.code, run.by)))
            if args.html:
                write(args.html, page(run.title, run.findings, run.summary, run.history, run.facts))
        return 0
