"""Reading a record back, whole or cut short by a kill."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from halfstep.errors import RecordError
from halfstep.events import Event, decode


def ranks(folder: Path) -> dict[int, Path]:
    """The event files of a record, by rank."""
    files = {int(p.name[len("events-rank") : -len(".jsonl.gz")]): p for p in folder.glob("events-rank*.jsonl.gz")}
    if not files:
        raise RecordError(f"{folder} holds no events", "name the folder given to --record")
    return dict(sorted(files.items()))


def events(path: Path) -> Iterator[Event]:
    """The events of one rank's file, in order, as far as they were written."""
    unzip = zlib.decompressobj(31)
    rest = b""
    with open(path, "rb") as file:
        while chunk := file.read(1 << 16):
            try:
                rest += unzip.decompress(chunk)
            except zlib.error:
                break
            *lines, rest = rest.split(b"\n")
            for line in lines:
                event = _event(line)
                if event is not None:
                    yield event
    event = _event(rest)
    if event is not None:
        yield event


def _event(line: bytes) -> Event | None:
    try:
        return decode(line.decode()) if line.strip() else None
    except ValueError:
        return None  # the last line of a killed run
