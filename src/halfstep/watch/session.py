"""A session: from the moment torch is watched to the moment it is exactly as it was."""

from __future__ import annotations

import itertools
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from halfstep.checks.judge import Judge, Summary
from halfstep.events import Ended, Event, Fault, Finding, Place, Raised, Started, flat
from halfstep.record.history import History
from halfstep.record.writer import RecordWriter
from halfstep.watch.ledger import Ledger
from halfstep.watch.look import Look
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users, place
from halfstep.watch.stream import Stream


class Sight(Protocol):
    """One subject of the watch: it hooks what concerns it and emits events. One file a subject."""

    def install(self, patches: Patches) -> None: ...


class Session:
    """Watches torch in this process, records events and judges them as they come.

    Use it as a context manager, or `start` and `stop` it (across notebook cells). A session inside a session is
    silent: the outer one sees everything. ``record``: a directory to keep the events in (None: kept only in memory,
    judged and forgotten). ``tell``: called with each error finding as soon as it is certain. ``limit``: end the run,
    by `halfstep.launch.Enough`, after so many applied updates. ``among_others``: the process is one of several of a run
    that keep their records together. ``meeting``: where to keep one from the moment that the process turns out to be a
    rank of several, if it has none. ``beside``: trace each update, so that it can be set beside another run's.
    """

    _active: Session | None = None

    def __init__(
        self,
        *,
        record: str | os.PathLike[str] | None = None,
        tell: Callable[[Finding], None] | None = None,
        limit: int | None = None,
        among_others: bool = False,
        meeting: Path | None = None,
        beside: bool = False,
    ) -> None:
        self.beside = beside
        self._meeting = meeting
        self.rank, self.world_size = launched_as()
        self.where = ""  # how its ranks found each other
        self.judge = Judge(tell=tell)
        self.history = History()
        self.limit = limit
        self._writer: RecordWriter | None = None
        if record is not None:
            known = 0 if self.rank is None and not among_others else self.rank
            self._writer = RecordWriter(Path(record), known, among_others=among_others)
        self.stream = Stream(self._release, self._keep)
        self.ledger = Ledger()
        self.look = Look(self)
        self.patches = Patches(self.fault, self.look.silent)
        self.place: Callable[[], Place | None] = place
        self._numbers: dict[str, itertools.count[int]] = {}
        self._idents: dict[tuple[str, int], tuple[weakref.ref[Any], int]] = {}
        self._faults: set[tuple[str, str]] = set()
        self._lock = threading.RLock()
        self._began = 0.0
        self._nested = False
        self.sights: Sequence[Sight] = ()

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> Session:
        if Session._active is not None:
            self._nested = Session._active is not self
            return self
        from halfstep.watch.sights import sights

        Session._active = self
        self._nested = False
        self._began = self._began or time.time()
        self.stream.emit(
            Started,
            argv=tuple(sys.argv),
            versions={"python": platform.python_version(), "torch": torch.__version__},
            devices=tuple(sorted({"cpu", *_accelerator()})),
            rank=self.rank or 0,
            world_size=self.world_size,
            pid=os.getpid(),
            time=self._began,
        )
        self.sights = self.sights or sights(self)
        for sight in self.sights:
            try:
                sight.install(self.patches)
            except Exception as error:
                self.fault(f"install {type(sight).__name__}", error)
        self.patches.live = True
        if self._writer is not None:
            self.stream.flush()
            self._writer.flush()  # who this is can be read from now on
        self.look.open()
        return self

    def stop(self) -> Session:
        """Put torch back and judge what is left; may be started again."""
        if Session._active is self:
            self.look.close()
            self.patches.restore()
            self._remove_sights()
            Session._active = None
            self.stream.flush()
        return self

    def _remove_sights(self) -> None:
        for sight in reversed(self.sights):
            remove = getattr(sight, "remove", None)
            if remove is not None:
                try:
                    remove()
                except Exception as error:
                    self.fault(f"remove {type(sight).__name__}", error)

    def sleep(self) -> None:
        """In a forked child: see nothing. Quick; nothing is put back."""
        if Session._active is self:
            Session._active = None
        self.patches.live = False
        self.look.close()

    def leave(self) -> None:
        """In a forked child: put torch back and forget what the parent had seen."""
        self.sleep()
        self._writer = None
        self.patches.restore()
        self._remove_sights()

    def joined(self, rank: int, world_size: int, where: str) -> None:
        """The process turned out to be a rank of a group."""
        if self._writer is not None and self.rank is None:
            self._writer.named(rank)
        elif self._writer is None and self._meeting is not None and world_size > 1:
            self._writer = RecordWriter(self._meeting, rank, among_others=True)
        self.rank, self.world_size, self.where = rank, world_size, where

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and not self._nested:
            self.raised(error)
        self.finish(None if error is None else 1)

    def raised(self, error: BaseException) -> None:
        """The script ended in this exception (its place: the innermost line of the user's)."""
        frames: list[Place] = []
        in_backward = False
        tb = error.__traceback__
        while tb is not None:
            code = tb.tb_frame.f_code
            in_backward |= code.co_name == "_engine_run_backward"
            if is_users(code):
                frames.append(Place(code.co_filename, tb.tb_lineno, code.co_qualname))
            tb = tb.tb_next
        for sight in self.sights:
            told = getattr(sight, "raised", None)
            if told is not None:
                try:
                    told(error)
                except Exception as own:
                    self.fault(f"raised {type(sight).__name__}", own)
        self.stream.emit(
            Raised,
            at=frames[-1] if frames else None,
            type=type(error).__name__,
            message=str(error)[:2000],
            frames=tuple(frames),
            in_backward=in_backward,
        )

    def finish(self, code: int | str | None = 0, by: str = "script") -> None:
        """End the record and the judgement. Safe to call twice."""
        if self._nested:
            return
        self.stop()
        if not self.judge.ended:
            self.stream.emit(Ended, code=code, by=by, seconds=time.time() - self._began)
            self.stream.flush()
            self.judge.end()
            if self._writer is not None:
                try:
                    self._writer.close(self.verdict(code, by))
                except OSError as error:  # the folder is gone: the run was told without this process
                    self.fault("closing the record", error)

    def verdict(self, code: int | str | None, by: str) -> dict[str, Any]:
        """What this process made of its own events, as plain data: for the merged report of all processes."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "where": self.where,
            "began": self._began,
            "ended": time.time(),
            "code": code,
            "by": by,
            "argv": list(sys.argv),
            "findings": [flat(f) for f in self.judge.unfolded()],
            "summary": flat(self.judge.summary),
        }

    # -- what sights use -----------------------------------------------------------------------------------------

    def ident(self, kind: str, thing: Any) -> int:
        """The number of ``thing`` among its kind in this run; the thing itself is not kept alive."""
        key = (kind, id(thing))
        known = self._idents.get(key)
        if known is not None and known[0]() is thing:
            return known[1]
        number = next(self._numbers.setdefault(kind, itertools.count(1)))
        self._idents[key] = (weakref.ref(thing), number)
        return number

    def fault(self, where: str, error: BaseException) -> None:
        """A failure of our own: told once a place, never raised into the run."""
        message = f"{type(error).__name__}: {error}"
        if (where, message) not in self._faults:
            self._faults.add((where, message))
            self.stream.emit(Fault, where=where, message=message[:500])

    def applied(self, draft_at: Place | None) -> None:
        """An update was attempted: release what gathered, and end the run when it has seen enough."""
        with self.patches.lock:
            self.look.update_ended()
            self.stream.breathe()
        if self.limit is not None:
            self.stream.flush()
            if self.judge.summary.applied >= self.limit:
                from halfstep.launch import Enough

                raise Enough

    @property
    def record(self) -> Path | None:
        """The file of this process's events."""
        return None if self._writer is None else self._writer.path

    # -- results -------------------------------------------------------------------------------------------------

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found so far, the gravest first. Reading it flushes late values."""
        outer = Session._active if self._nested else None
        if outer is not None:
            return outer.findings
        self._flush()
        return self.judge.findings()

    @property
    def summary(self) -> Summary:
        self._flush()
        return self.judge.summary

    def facts(self) -> dict[str, str]:
        """What a report says of the run beside its numbers."""
        return {
            "command": " ".join(sys.argv),
            "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._began)),
            "versions": f"python {platform.python_version()}, torch {torch.__version__}",
            "devices": ", ".join(sorted({"cpu", *_accelerator()})),
        }

    def _flush(self) -> None:
        with self.look.silent():
            self.stream.flush()

    def _release(self, event: Event) -> None:
        with self._lock:
            try:
                if self._writer is not None:
                    self._writer.write(event)
                self.history.see(event)
                self.judge.see(event)
            except Exception as error:
                self._release_fault(event, error)

    def _keep(self) -> None:
        with self._lock:
            if self._writer is not None:
                self._writer.flush()

    def _release_fault(self, event: Event, error: Exception) -> None:
        self.judge.broken(f"judging {type(event).__name__} {event.seq}", error)


def _forked() -> None:
    """In a forked child (a data loader's worker, say) nothing is watched, unless a session of its own begins there."""
    if Session._active is not None:
        Session._active.sleep()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def launched_as() -> tuple[int | None, int]:
    """This process's rank and the number of ranks, by the launcher's word: (None, 1) without one."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not rank.isdecimal():
        return None, 1
    return int(rank), int(world_size) if world_size.isdecimal() else 1


def _accelerator() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return () if device is None else (device.type,)
