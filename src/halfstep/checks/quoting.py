"""Torch's own words in a finding's."""

from __future__ import annotations

from halfstep.events import Raised, Refused


def quoted(event: Raised | Refused) -> str:
    """An exception's type and message on one line, cut where it is long."""
    words = " ".join(event.message.split())
    return f"{event.type}: {words if len(words) < 120 else words[:117] + '...'}"
