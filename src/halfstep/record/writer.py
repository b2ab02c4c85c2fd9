"""One file of events a process: gzip of JSON lines, flushed so that a killed run is readable up to its last flush."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import RecordError
from halfstep.events import Event, encode

_CHUNK = 64 * 1024


class RecordWriter:
    """Appends events to ``events-rank{rank}.jsonl.gz`` in ``folder``, or ``events-pid{pid}…`` without a rank.

    A folder that already holds this rank's events is refused: a record is of one run. ``among_others``: it is one of
    several processes of the run, where a rank may occur again (a script that starts its processes twice): then the
    file's name gets a number.
    """

    def __init__(self, folder: Path, rank: int | None = 0, *, among_others: bool = False) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for self.path in _names(folder, rank):
                try:
                    self._file = open(self.path, "xb")  # noqa: SIM115 - open for the run's life
                    break
                except FileExistsError:
                    if not among_others:
                        raise
        except FileExistsError:
            raise RecordError(
                f"{self.path} exists already: it holds another run's events", "name another --record folder"
            ) from None
        except OSError as error:
            raise RecordError(
                f"cannot write a record in {folder}: {error}", "name a folder that can be written"
            ) from error
        self._zip = zlib.compressobj(6, zlib.DEFLATED, 31)
        self._lines: list[str] = []
        self._size = 0
        self._pid = os.getpid()

    def named(self, rank: int) -> None:
        """From now on this is the file of ``rank``, which was not known before."""
        if os.getpid() != self._pid:
            return
        for path in _names(self.path.parent, rank):
            try:
                os.link(self.path, path)  # never over another's file
            except FileExistsError:
                continue
            except OSError:
                return  # a file system without links: the events themselves tell the rank
            os.unlink(self.path)
            self.path = path
            return

    def write(self, event: Event) -> None:
        line = encode(event)
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        if os.getpid() != self._pid or self._file.closed:
            return  # a forked child must not write its parent's file
        if self._lines:
            data = ("\n".join(self._lines) + "\n").encode()
            self._lines.clear()
            self._size = 0
            self._file.write(self._zip.compress(data) + self._zip.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()

    def close(self, verdict: Mapping[str, Any] | None = None) -> None:
        """End the file; ``verdict``: what the process itself made of its events, kept beside them."""
        self.flush()
        if os.getpid() != self._pid or self._file.closed:
            return
        self._file.write(self._zip.flush(zlib.Z_FINISH))
        self._file.close()
        if verdict is not None:
            path = verdict_of(self.path)
            part = path.with_name(f".{path.name}")
            part.write_text(json.dumps(verdict), encoding="utf-8")
            os.replace(part, path)


def verdict_of(events: Path) -> Path:
    """Where the verdict on a file of events lies."""
    stem = events.name.removeprefix("events-").removesuffix(".jsonl.gz")
    return events.with_name(f"verdict-{stem}.json")


def _names(folder: Path, rank: int | None) -> itertools.chain[Path]:
    stem = f"events-rank{rank}" if rank is not None else f"events-pid{os.getpid()}"
    more = (folder / f"{stem}-{n}.jsonl.gz" for n in itertools.count(2))
    return itertools.chain((folder / f"{stem}.jsonl.gz",), more)
