"""One file of events a rank: gzip of JSON lines, flushed so that a killed run is readable up to its last flush."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

from halfstep.errors import RecordError
from halfstep.events import Event, encode

_CHUNK = 64 * 1024
_PATIENCE = 2.0  # seconds after which a small chunk is written all the same


class RecordWriter:
    """Appends events to ``events-rank{rank}.jsonl.gz`` in ``folder``.

    A folder that already holds this rank's events is refused: a record is of one run.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = folder / f"events-rank{rank}.jsonl.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "xb")  # noqa: SIM115 - open for the run's life
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
        self._flushed = time.monotonic()
        self._pid = os.getpid()

    def write(self, event: Event) -> None:
        line = encode(event)
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _CHUNK or time.monotonic() - self._flushed > _PATIENCE:
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
        self._flushed = time.monotonic()

    def close(self) -> None:
        self.flush()
        if os.getpid() == self._pid and not self._file.closed:
            self._file.write(self._zip.flush(zlib.Z_FINISH))
            self._file.close()
