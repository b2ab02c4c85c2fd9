"""A kept record judged again: the same events give the same findings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halfstep.checks.judge import Summary
from halfstep.events import Finding
from halfstep.record.history import History
from halfstep.report.ranks import history, merged


@dataclass(slots=True)
class Replay:
    """What a record shows. ``by`` is "unknown" where the run was cut short before it could say how it ended."""

    title: str
    findings: tuple[Finding, ...]
    summary: Summary
    history: History
    facts: dict[str, str]
    code: int | str | None = None
    by: str = "unknown"


def replay(folder: Path) -> Replay:
    """Judge a record anew, of one process or many. Raises `halfstep.errors.RecordError` where there is none."""
    whole = merged(folder, anew=True)
    main = whole.main or whole.parts[0]
    facts = {"record": str(folder), "ranks": str(len(whole.parts)), **main.facts}
    title = " ".join(main.argv) or str(folder)
    return Replay(title, whole.findings, whole.summary, history(main), facts, main.code, main.by)
