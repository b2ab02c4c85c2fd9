"""The short summary after a run, on stderr."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from halfstep.checks.judge import Summary
from halfstep.events import Finding

_STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def show(findings: Sequence[Finding], summary: Summary, console: Console) -> None:
    """What ran in one or two lines, then the findings by severity, each with its source line and fix."""
    console.print(f"[bold]halfstep[/bold] {escape(ran(summary))}", highlight=False)
    told = [f for f in findings if f.severity != "info"]
    if not told:
        console.print(f"[green]clean[/green]: {escape(judged(summary))}", highlight=False)
    for finding in findings:
        _finding(finding, console)
    if told:
        console.print(escape(judged(summary)), style="dim", highlight=False)


def _finding(finding: Finding, console: Console) -> None:
    head = Text()
    head.append(finding.severity, style=_STYLE[finding.severity])
    head.append(f" {finding.rule}", style="bold")
    if finding.at is not None:
        head.append(f"  {short(finding.at.file)}:{finding.at.line}", style="blue")
    if finding.count > 1:
        head.append(f"  ({finding.count} times)", style="dim")
    console.print(head, highlight=False)
    if finding.at is not None:
        source = linecache.getline(finding.at.file, finding.at.line).strip()
        if source:
            console.print(Text(f"    {finding.at.line} | {source}", style="dim"), highlight=False)
    console.print(Text(f"    {finding.message}"), highlight=False)
    if finding.fix:
        console.print(Text(f"    fix: {finding.fix}", style="green"), highlight=False)


def ran(summary: Summary) -> str:
    """What ran: updates by outcome, micro-batches, precision, the path of the loss scale."""
    parts = [
        f"{summary.attempted} attempted updates: {summary.applied} applied, {summary.skipped} skipped"
        + (f", {summary.empty} empty" if summary.empty else ""),
        f"{summary.micro_batches} micro-batches",
    ]
    if summary.sizes:
        usual = max(summary.sizes, key=lambda s: summary.sizes[s])
        parts.append(f"{usual} an update")
    if summary.precisions:
        parts.append(" and ".join(summary.precisions))
    if summary.scale_path:
        path = [f"{scale:g}" for _, scale in summary.scale_path]
        parts.append("loss scale " + " → ".join(path if len(path) <= 5 else [*path[:2], "…", *path[-2:]]))
    return ", ".join(parts)


def judged(summary: Summary) -> str:
    """What was judged, and what was not (law 12)."""
    if not summary.micro_batches:
        return "no backward was seen: nothing to judge"
    share = summary.weighed / summary.micro_batches
    text = f"{summary.attempted} updates judged; {share:.0%} of contributions weighed"
    if summary.opaque:
        text += "; not judged: loss at " + ", ".join(short(place) for place in summary.opaque)
    return text


def short(file: str) -> str:
    """The path as a person in this folder would write it."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return relative if len(relative) < len(file) else file
