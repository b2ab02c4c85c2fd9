"""Reading a record back, whole or cut short by a kill."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.errors import RecordError
from halfstep.events import Event, decode
from halfstep.record.writer import verdict_of

_OF_RANK = re.compile(r"events-rank(\d+)\.jsonl\.gz")


def files(folder: Path) -> list[Path]:
    """The event files of a record, one a process that trained; those of ranks first, by rank."""
    found = sorted(folder.glob("events-*.jsonl.gz"), key=_order)
    if not found:
        raise RecordError(f"{folder} holds no events", "name the folder given to --record")
    return found


def ranks(folder: Path) -> dict[int, Path]:
    """The event files of a record, by rank: where a rank occurs several times, its first."""
    known = ((_OF_RANK.fullmatch(p.name), p) for p in files(folder))
    return {int(match[1]): path for match, path in known if match is not None}


def verdict(path: Path) -> dict[str, Any] | None:
    """What the process that wrote this file of events made of them; None where it did not come to that."""
    try:
        found = json.loads(verdict_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of events, in order, as far as they were written; the last may be cut.

    Raises `halfstep.errors.RecordError` where the file holds something, and nothing of it can be read.
    """
    unzip = zlib.decompressobj(31)
    rest = b""
    any_line = False
    with open(path, "rb") as file:
        while chunk := file.read(1 << 16):
            try:
                rest += unzip.decompress(chunk)
            except zlib.error as error:
                if not any_line:
                    words = f"{path} cannot be read: it is no file of events any more ({error})"
                    raise RecordError(words, "the record as the run wrote it") from error
                break
            *whole, rest = rest.split(b"\n")
            if whole and not any_line and not kind_of(whole[0]):
                raise RecordError(f"{path} cannot be read: it holds no events", "the record as the run wrote it")
            any_line = any_line or bool(whole)
            yield from whole
    yield rest


def events(path: Path) -> Iterator[Event]:
    """The events of a file, in order, as far as they were written."""
    for line in lines(path):
        event = parsed(line)
        if event is not None:
            yield event


def kind_of(line: bytes) -> str:
    """The class of the event that a line holds, found without reading the line; empty for a line that is none."""
    if not line.startswith(b'{"kind":"'):
        return ""
    return line[9 : line.find(b'"', 9)].decode("ascii", "replace")


def parsed(line: bytes) -> Event | None:
    """The event of a line; None for a cut or unknown one."""
    try:
        return decode(line.decode()) if line.strip() else None
    except ValueError:
        return None  # the last line of a killed run


def _order(path: Path) -> tuple[bool, int, str]:
    number = re.search(r"rank(\d+)", path.name)
    return number is None, int(number[1]) if number is not None else 0, path.name
