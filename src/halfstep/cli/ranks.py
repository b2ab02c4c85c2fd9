"""The processes of a launcher (torchrun, accelerate) on one machine: where they meet, and which of them speaks.

None waits for another, so that a run ends as it would without us: whoever comes to its end last tells what all found.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from halfstep.errors import RecordError
from halfstep.events import Started
from halfstep.record.reader import events, files, verdict

_PATIENCE = 10.0  # seconds in which children may come to their end after their parent has
_ROUND = 0.05


@dataclass(frozen=True, slots=True)
class Standing:
    """This process among those that a launcher has started on this machine.

    ``expected``: how many they are (None: it did not say); ``node``: number of the machine; ``restart``: how
    often the launcher began anew.
    """

    rank: int
    expected: int | None
    node: int
    restart: int
    folder: Path

    def arrive(self) -> None:
        """Be known to the others from now on."""
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / f"here-{self.rank}-{os.getpid()}").touch()

    def is_last(self) -> bool:
        """To be asked once, at the end: whether every other has come to its end or is dead."""
        with suppress(OSError):
            own = self.folder / f"here-{self.rank}-{os.getpid()}"
            own.rename(self.folder / f"left-{self.rank}-{os.getpid()}")
        came = sum(1 for _ in self._marks("left")) + sum(1 for _ in self._marks("here"))
        if self.expected is not None and came < self.expected:
            return False  # one has not even begun
        if any(_lives(pid) for pid in self._marks("here")):
            return False
        with suppress(OSError):
            os.close(os.open(self.folder / "speaker", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        return False  # another came to its end in the same moment

    def _marks(self, word: str) -> Iterator[int]:
        return (int(p.name.rpartition("-")[2]) for p in self.folder.glob(f"{word}-*"))

    def named(self, path: Path) -> Path:
        """A file of this machine's: later machines may share the file system with the first."""
        return path if self.node == 0 else path.with_name(f"{path.stem}-node{self.node}{path.suffix}")


def standing() -> Standing | None:
    """By the launcher's word; None for a process that is no rank of several."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank is None or size is None or size < 2:
        return None
    parent, user = os.getppid(), os.getuid() if hasattr(os, "getuid") else 0
    stat = _stat(parent)
    began = stat[19] if len(stat) > 19 else "0"  # a number of a process may be used again later
    restart = _number("TORCHELASTIC_RESTART_COUNT") or 0
    name = f"halfstep-{user}-{parent}-{began}-{restart}"
    folder = Path(tempfile.gettempdir()) / name
    return Standing(rank, _number("LOCAL_WORLD_SIZE"), _number("GROUP_RANK") or 0, restart, folder)


def wait(folder: Path, patience: float = _PATIENCE) -> None:
    """Until every process with a record here has told its verdict or is dead, at most so many seconds."""
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        waiting = [started for path in _files(folder) if verdict(path) is None and (started := _started(path))]
        if not any(s.pid != os.getpid() and _lives(s.pid) for s in waiting):
            return
        time.sleep(_ROUND)


def clear(folder: Path) -> None:
    """Take away what nobody asked to keep."""
    shutil.rmtree(folder, ignore_errors=True)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


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


def _stat(pid: int) -> list[str]:
    """Linux's words on a process, from its state on; empty elsewhere."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
