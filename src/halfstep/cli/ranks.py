"""The processes of a run, seen from the command line: who of them speaks, and how long it waits for the others."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from halfstep.errors import RecordError
from halfstep.events import Started
from halfstep.record.reader import events, files, verdict

_PATIENCE = 10.0  # seconds in which the other ranks may come to their end after this one has
_ROUND = 0.05


@dataclass(frozen=True, slots=True)
class Standing:
    """This process among those that a launcher (torchrun, accelerate) has started on this machine."""

    rank: int
    local: int
    parent: int
    restart: int
    node: int

    def folder(self) -> Path:
        """Where the ranks of this machine meet: known to all children of one launcher without a word between them."""
        began = _began(self.parent)
        user = os.getuid() if hasattr(os, "getuid") else 0
        return Path(tempfile.gettempdir()) / f"halfstep-{user}-{self.parent}-{began}-{self.restart}"


def standing() -> Standing | None:
    """By the launcher's word; None for a process that is no rank of several."""
    number = os.environ.get
    rank, size = number("RANK", ""), number("WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal() and int(size) > 1):
        return None
    local = number("LOCAL_RANK", rank)
    restart, node = number("TORCHELASTIC_RESTART_COUNT", "0"), number("GROUP_RANK", "0")
    return Standing(
        int(rank),
        int(local) if local.isdecimal() else int(rank),
        os.getppid(),
        int(restart) if restart.isdecimal() else 0,
        int(node) if node.isdecimal() else 0,
    )


def speaks(here: Standing, folder: Path) -> bool:
    """Whether this rank tells what all of them found: the first on its machine, or the next where that one is dead."""
    if here.local == 0:
        return True
    first = here.rank - here.local
    for path in _files(folder):
        started = _started(path)
        if started is not None and started.rank == first:
            return verdict(path) is None and not _lives(started.pid) and _alone(folder)
    return "TORCHELASTIC_RUN_ID" not in os.environ and _alone(folder)  # begun by hand, each on its own


def wait(folder: Path, patience: float = _PATIENCE) -> None:
    """Until every process that trained has told its verdict or is dead, at most so many seconds."""
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        waiting = [path for path in _files(folder) if verdict(path) is None]
        started = [_started(path) for path in waiting]
        if not any(s is not None and s.pid != os.getpid() and _lives(s.pid) for s in started):
            return
        time.sleep(_ROUND)


def clear(folder: Path) -> None:
    """Take a record away that nobody asked to keep."""
    shutil.rmtree(folder, ignore_errors=True)


def _alone(folder: Path) -> bool:
    """Only one rank may stand in for the first."""
    with suppress(OSError):
        os.close(os.open(folder / "speaker", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return True
    return False


def _files(folder: Path) -> list[Path]:
    try:
        return files(folder)
    except RecordError:
        return []


def _started(path: Path) -> Started | None:
    with suppress(OSError):
        return next((e for e in islice(events(path), 1) if isinstance(e, Started)), None)
    return None


def _lives(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent's notice does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return _stat(pid)[:1] not in (["Z"], ["X"])


def _began(pid: int) -> str:
    """When a process was started, so that its number used again later is not taken for it."""
    stat = _stat(pid)
    return stat[19] if len(stat) > 19 else "0"


def _stat(pid: int) -> list[str]:
    """Linux's words on a process, from its state on; empty elsewhere."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
