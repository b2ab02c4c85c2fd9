"""The short summary after a run, on stderr: what ran, then what is wrong with it, the gravest first."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.checks.judge import Summary
from halfstep.events import Finding, Place

_STYLE = {"error": "bold red", "warning": "bold yellow", "info": "cyan"}
_INDENT = 9


def show(findings: Sequence[Finding], summary: Summary, console: Console) -> None:
    """One line for a clean run; else what ran, each finding with its source line, numbers and fix, what was judged.

    Where the console is no terminal nothing is wrapped, so that the text can be searched and cut by line.
    """
    loud = [f for f in findings if f.severity != "info"]
    head = Text.assemble(("halfstep", "bold"), " · ")
    if not loud:
        head.append("clean" if summary.micro_batches else "nothing to judge", style="bold green")
        head.append(" · ")
    head.append(ran(summary))
    if not loud:
        head.append(f" · {judged(summary)}")
    print_line(console, head)
    for finding in findings:
        print_line(console, Text())
        _show(finding, console)
    if loud:
        print_line(console, Text())
        print_line(console, Text(f"{counted(findings)} · {judged(summary)}"))
        print_line(console, Text(f"more: halfstep explain {loud[0].rule}", style="dim"))


def _show(finding: Finding, console: Console) -> None:
    left = Text.assemble((finding.severity.ljust(_INDENT), _STYLE[finding.severity]), (finding.rule, "bold"))
    right = Text(where(finding), style="blue")
    if finding.count > 1:
        right.append(f"   {finding.count:,} times", style="dim")
    if console.is_terminal:
        grid = Table.grid(expand=True)
        grid.add_column()
        grid.add_column(justify="right")
        grid.add_row(left, right)
        console.print(grid)
    else:
        print_line(console, Text.assemble(left, "  ", right))
    source = _source(finding.at)
    if finding.at is not None and source:
        _body(console, Text.assemble((f"{finding.at.line} │ ", "dim"), source))
    _body(console, Text(finding.message))
    if finding.fix:
        _body(console, Text.assemble(("fix: ", "green"), finding.fix))


def _body(console: Console, text: Text) -> None:
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, _INDENT)), highlight=False)
    else:
        for line in text.split("\n"):
            print_line(console, Text(" " * _INDENT) + line)


def print_line(console: Console, text: Text) -> None:
    """Whole lines where the console is no terminal, so that they can be searched and cut."""
    console.print(text, highlight=False, soft_wrap=not console.is_terminal)


def where(finding: Finding) -> str:
    """Line, module, operator, phase, update and rank of a finding, as far as they are known."""
    parts = [f"{short(finding.at.file)}:{finding.at.line}"] if finding.at is not None else []
    if finding.module:
        parts.append(f"in {finding.module}")
    if finding.operator:
        parts.append(f"{finding.operator} ({finding.phase})" if finding.phase else finding.operator)
    if finding.rank is not None:
        parts.append(f"rank {finding.rank}")
    return " · ".join(parts)


def counted(findings: Sequence[Finding]) -> str:
    """ "2 errors, 1 warning"."""
    out = []
    for severity in ("error", "warning", "info"):
        count = sum(f.severity == severity for f in findings)
        if count:
            plural = "" if count == 1 or severity == "info" else "s"
            out.append(f"{count} {severity}{plural}")
    return ", ".join(out) or "no findings"


def ran(summary: Summary) -> str:
    """What ran: updates by outcome, micro-batches, precision, the path of the loss scale."""
    if not summary.attempted:
        return f"no update was attempted, {_many(summary.micro_batches, 'micro-batch')}"
    outcomes = [f"{summary.applied:,} applied"]
    outcomes += [f"{n:,} {name}" for n, name in ((summary.skipped, "skipped"), (summary.empty, "empty")) if n]
    parts = [f"{_many(summary.attempted, 'attempted update')} ({', '.join(outcomes)})"]
    micro = _many(summary.micro_batches, "micro-batch")
    if summary.sizes:
        usual = max(summary.sizes, key=lambda size: summary.sizes[size])
        odd = len(summary.sizes) > 1
        micro += f", {'mostly ' if odd else ''}{usual} an update"
    parts.append(micro)
    if summary.precisions:
        parts.append(" and ".join(summary.precisions))
    if summary.scale_path:
        path = [f"{scale:g}" for _, scale in summary.scale_path]
        parts.append("loss scale " + " → ".join(path if len(path) <= 5 else [*path[:2], "…", *path[-2:]]))
    return " · ".join(parts)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def judged(summary: Summary) -> str:
    """What was judged, and what was not (law 12)."""
    if not summary.micro_batches:
        text = "no backward was seen"
    else:
        text = f"{summary.weighed / summary.micro_batches:.0%} of contributions weighed"
    missing = [f"loss at {short(place)}" for place in summary.opaque] + summary.not_judged
    return f"{text}; not judged: {', '.join(missing)}" if missing else text


def short(file: str) -> str:
    """The path as a person in this folder would write it."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return relative if len(relative) < len(file) else file


def _source(at: Place | None) -> str:
    return linecache.getline(at.file, at.line).strip() if at is not None else ""
