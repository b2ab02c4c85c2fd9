"""What every event carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCHEMA = 1

Severity = Literal["error", "warning", "info"]
Outcome = Literal["applied", "skipped", "empty"]


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's: file, line and function; in a notebook the file is the cell's name."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What every event carries: its number in the run, the user's line, the contributions begun so far."""

    seq: int = 0
    at: Place | None = None
    micro: int = 0
