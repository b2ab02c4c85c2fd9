"""A kept record judged again: the same events give the same findings."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from halfstep.checks.judge import Judge, Summary
from halfstep.events import Ended, Finding, Started
from halfstep.record.history import History
from halfstep.record.reader import events, ranks


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
    """Judge a record anew. Raises `halfstep.errors.RecordError` where there is none."""
    files = ranks(folder)
    judge, history = Judge(), History()
    run = Replay(str(folder), (), judge.summary, history, {"record": str(folder), "ranks": str(len(files))})
    for event in events(files[min(files)]):
        judge.see(event)
        history.see(event)
        if isinstance(event, Started):
            run.title = " ".join(event.argv) or run.title
            run.facts["command"] = run.title
            run.facts["began"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
            run.facts["versions"] = ", ".join(f"{k} {v}" for k, v in event.versions.items())
            run.facts["devices"] = ", ".join(event.devices)
        elif isinstance(event, Ended):
            run.code, run.by = event.code, event.by
    judge.end()
    run.findings, run.summary = judge.findings(), judge.summary
    return run
