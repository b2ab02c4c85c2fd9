"""What `halfstep run` does around a script: a session while it runs, the report once it has ended.

Of several processes each keeps a record. The script's own process tells what its children found too; of a launcher's,
the last that comes to its end tells what all of them found.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep import launch
from halfstep.cli import ranks

if TYPE_CHECKING:
    from halfstep.record.history import History
    from halfstep.report.ranks import Whole
    from halfstep.watch.session import Session

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
        self._pid = os.getpid()
        self._session: Session | None = None
        self._among = ranks.standing()
        self._folder = self._record or (self._among.folder if self._among else _unused())
        if self._among is not None:
            self._among.arrive()

    def before(self, target: launch.Target) -> None:
        launch.in_spawned("halfstep.watch.company", "arrive", str(self._folder), self._updates)
        # Not before the script imports torch: what it sets up for that import (threads, devices) still counts.
        launch.when_imported("torch", self._start)

    def _start(self) -> None:
        if os.getpid() != self._pid:
            self._follow()
            return
        from halfstep.watch.session import Session
        from halfstep.watch.told import Teller

        among = self._among
        try:
            self._session = Session(
                record=self._folder if self._record or among else None,
                tell=Teller(lambda: None if self._session is None else self._session.rank),
                limit=self._updates,
                among_others=among is not None and (self._record is None or among.restart > 0),
                meeting=self._folder,
            )
            self._session.start()
        except Exception as error:
            print(f"halfstep: not watching: {type(error).__name__}: {error}", file=sys.__stderr__)

    def raised(self, exc: BaseException) -> None:
        if self._session is not None:
            self._session.raised(exc)

    def finish(self, code: int | None, by: str) -> int | None:
        if self._session is not None:
            self._session.finish(code, by)
        if self._among is not None and not self._among.is_last():
            return None
        try:
            return self._tell_all(code, by)
        finally:
            if self._record is None:
                ranks.clear(self._folder)
            if self._among is not None:
                ranks.clear(self._among.folder)

    def _tell_all(self, code: int | None, by: str) -> int | None:
        from rich.console import Console

        from halfstep.report.document import document, dump
        from halfstep.report.terminal import show

        whole = self._whole()
        findings, summary = whole.findings, whole.summary
        status: int | str | None = code
        if self._among is not None:
            status = whole.code(code)
            for name in ("_json", "_html"):
                path = getattr(self, name)
                setattr(self, name, None if path is None else self._among.named(path))
        failing = [f for f in findings if f.severity in _GRAVE[self._fail_on]]
        changed = 3 if failing and status == 0 else None
        if self._json is not None:
            ending = (status, by) if changed is None else (changed, "halfstep")
            _keep(self._json, dump(document(findings, summary, *ending)))
        if self._html is not None:
            from halfstep.report.page import page

            facts = self._session.facts() if self._session is not None else {"command": " ".join(sys.argv)}
            _keep(self._html, page(" ".join(sys.argv), findings, summary, self._history(whole), facts))
        if sys.__stderr__ is not None:
            show(findings, summary, Console(file=sys.__stderr__))  # the script may have replaced its own
        return changed

    def _whole(self) -> Whole:
        """What all processes found together."""
        from halfstep.checks.judge import Judge
        from halfstep.report.ranks import Part, merged, whole

        if self._folder.is_dir() and self._among is None:
            ranks.wait(self._folder)
        session, own = self._session, []
        if session is not None and session.record is None:
            own.append(Part(None, session.judge.unfolded(), session.summary))
        if own and not self._folder.is_dir():
            return whole(own)
        try:
            return merged(self._folder, own)
        except Exception as error:
            nothing = Part(None, [], Judge().summary)
            gone = "anything: torch was not imported" if session is None else f"other processes: {error}"
            nothing.summary.not_judged.append(gone)
            return whole([*own, nothing])

    def _history(self, whole: Whole) -> History:
        from halfstep.record.history import History
        from halfstep.report.ranks import history

        own = self._session.record if self._session is not None else None
        if self._session is not None and (whole.main is None or whole.main.path == own):
            return self._session.history
        return history(whole.main) if whole.main is not None else History()

    def on_fork(self) -> launch.Hooks | None:
        if "torch" in sys.modules:
            self._follow()
        return None

    def _follow(self) -> None:
        """In a forked child: watch it too, once it trains."""
        from halfstep.watch.company import Company

        with suppress(Exception):
            Company(self._folder, self._updates).forked(self._session)


def _unused() -> Path:
    """A folder that nobody else makes; it comes to be only if a child process trains."""
    return Path(tempfile.gettempdir()) / f"halfstep-{os.getpid()}-{os.urandom(8).hex()}"


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
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
