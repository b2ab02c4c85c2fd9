"""What `halfstep run` does around a script: a session while it runs, the report once it has ended."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep import launch

if TYPE_CHECKING:
    from halfstep.events import Finding
    from halfstep.watch.session import Session

_PATIENCE = 10.0  # seconds: what is certain in a shorter run is told in its report only
_GRAVE = {"error": ("error",), "warning": ("error", "warning"), "never": ()}


class Watched:
    """Hooks of a watched run. ``json``, ``html``: files for the report; ``record``: a folder for the events."""

    def __init__(
        self,
        *,
        json: Path | None = None,
        html: Path | None = None,
        record: Path | None = None,
        updates: int | None = None,
        fail_on: str = "never",
    ) -> None:
        self._json = None if json is None else Path(os.path.abspath(json))  # the script may change folder
        self._html = None if html is None else Path(os.path.abspath(html))
        self._record = None if record is None else Path(os.path.abspath(record))
        self._updates = updates
        self._fail_on = fail_on
        self._began = time.monotonic()
        self._pid = os.getpid()
        self._session: Session | None = None

    def before(self, target: launch.Target) -> None:
        # Not before the script imports torch: what it sets up for that import (threads, devices) still counts.
        launch.when_imported("torch", self._start)

    def _start(self) -> None:
        if os.getpid() != self._pid:
            return
        from halfstep.watch.session import Session

        try:
            self._session = Session(record=self._record, tell=self._tell, limit=self._updates)
            self._session.start()
        except Exception as error:
            print(f"halfstep: not watching: {type(error).__name__}: {error}", file=sys.__stderr__)

    def raised(self, exc: BaseException) -> None:
        if self._session is not None:
            self._session.raised(exc)

    def finish(self, code: int | None, by: str) -> int | None:
        from rich.console import Console

        from halfstep.checks.judge import Judge
        from halfstep.record.history import History
        from halfstep.report.document import document, dump
        from halfstep.report.terminal import show

        session = self._session
        if session is not None:
            session.finish(code, by)
            findings, summary, history, facts = session.findings, session.summary, session.history, session.facts()
        else:
            findings, summary, history, facts = (), Judge().summary, History(), {"command": " ".join(sys.argv)}
            summary.not_judged.append("anything: torch was not imported")
        failing = [f for f in findings if f.severity in _GRAVE[self._fail_on]]
        changed = 3 if failing and code == 0 else None
        if self._json is not None:
            doc = document(
                findings, summary, code if changed is None else changed, by if changed is None else "halfstep"
            )
            _keep(self._json, dump(doc))
        if self._html is not None:
            from halfstep.report.page import page

            _keep(self._html, page(" ".join(sys.argv), findings, summary, history, facts))
        if sys.__stderr__ is not None:
            show(findings, summary, Console(file=sys.__stderr__))  # the script may have replaced its own
        return changed

    def on_fork(self) -> launch.Hooks | None:
        return None

    def _tell(self, finding: Finding) -> None:
        """A long run is told at once what is certain."""
        if time.monotonic() - self._began < _PATIENCE:
            return
        where = f" {finding.at.file}:{finding.at.line}" if finding.at else ""
        print(f"halfstep: {finding.severity} {finding.rule}{where}: {finding.message}", file=sys.stderr)


def _keep(path: Path, text: str) -> None:
    """Write; what cannot be written is said, and the rest of the report still comes."""
    try:
        write(path, text)
    except OSError as error:
        print(f"halfstep: {path} is not written: {error}", file=sys.__stderr__)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part: Any = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
