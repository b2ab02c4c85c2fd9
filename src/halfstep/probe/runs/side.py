"""One of two runs that are compared: the script in a process of its own, watched, each update told to a file."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep import launch

if TYPE_CHECKING:
    from halfstep.watch.session import Session

SIDES = ("own", "fp32", "scaled", "jittered")
"""The script as it is; in FP32; in FP32, its loss scalers left on; in FP32 with random errors as large as rounding's in
every gradient. The last two are made only where they decide."""
TOLD, REACHED = "told.jsonl", "reached"
_FOREIGN = (str(Path(__file__).parents[1]), "site-packages", "dist-packages")
_WHOLE = 4096  # updates told one by one; of later ones every 2^k-th, so that a long run stays readable


def is_told(number: int) -> bool:
    """Whether this update (from 1 on) is told: the same in both runs."""
    stride = 1 << max(0, (number // _WHOLE).bit_length() - 1)
    return number % stride == 0


class Teller:
    """Appends lines of JSON, flushed once a second and at the end: a killed run is readable up to there."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / TOLD, "w", encoding="utf-8")  # noqa: SIM115 - open for the run's life
        self._reached = os.open(folder / REACHED, os.O_CREAT | os.O_RDWR)
        self._flushed = time.monotonic()
        self._pid = os.getpid()

    def tell(self, kind: str, **fields: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        if time.monotonic() - self._flushed > 1.0:
            self.flush()

    def reached(self, updates: int) -> None:
        """For the process that waits: so many updates were attempted."""
        if os.getpid() == self._pid:
            os.pwrite(self._reached, updates.to_bytes(8, "little"), 0)

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()


class Side:
    """Hooks of one run (see `halfstep.launch.Hooks`). ``updates``: attempted ones after which it ends (None: all).

    ``jitter``: size of the random errors, by the norm of a gradient.
    """

    def __init__(self, side: str, folder: Path, *, seed: int, updates: int | None, jitter: float = 0.0) -> None:
        self._side = side
        self._teller = Teller(folder)
        self._seed = seed
        self._updates = updates
        self._jitter = jitter
        self._session: Session | None = None
        self._undone: Mapping[str, int] = {}
        self._began = time.monotonic()

    def before(self, target: launch.Target) -> None:
        random.seed(self._seed)
        launch.when_imported("numpy", self._seed_numpy)
        launch.when_imported("torch", self._start)

    def _seed_numpy(self) -> None:
        sys.modules["numpy"].random.seed(self._seed)

    def _start(self) -> None:
        import torch

        from halfstep.probe.runs.traced import Traced

        torch.manual_seed(self._seed)
        if self._side != "own":
            from halfstep.probe.runs.fp32 import undo

            self._undone = undo(scalers=self._side != "scaled").counts
        self._session = Traced(self._teller, self._updates).start()
        if self._jitter:
            from halfstep.probe.runs.jitter import jitter

            jitter(self._jitter, self._seed)

    def raised(self, exc: BaseException) -> None:
        if self._session is not None:
            self._session.raised(exc)
        if not isinstance(exc, KeyboardInterrupt):
            frames = traceback.extract_tb(exc.__traceback__)
            users = [f for f in frames if not any(place in f.filename for place in _FOREIGN)]
            at = "".join(f"{f.filename}:{f.lineno}" for f in (users or frames)[-1:])
            if isinstance(exc, SyntaxError) and exc.filename:
                at = f"{exc.filename}:{exc.lineno}"
            self._teller.tell("raised", type=type(exc).__name__, message=str(exc)[:500], at=at)

    def finish(self, code: int | None, by: str) -> int | None:
        from halfstep.events import flat

        if self._session is not None:
            self._session.finish(code, by)
            found = [flat(finding) for finding in self._session.judge.findings()]
            self._teller.tell("verdict", findings=found, summary=flat(self._session.judge.summary))
        self._teller.tell(
            "end",
            code=code,
            by=by,
            seconds=time.monotonic() - self._began,
            torch=self._session is not None,
            undone=dict(self._undone),
        )
        self._teller.flush()
        return None

    def on_fork(self) -> launch.Hooks | None:
        return None
