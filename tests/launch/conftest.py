"""Runs a target both ways, under plain python and under halfstep, and holds the two ends together."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.launch.ends import SCRIPTS, End, begin, end

UNWATCHED = ("-m", "halfstep", "run", "--unwatched")


@pytest.fixture
def same() -> Callable[..., End]:
    """Runs `target` both ways and asserts one end; returns it, so that a test can say what that end must be."""

    def run(
        *target: str,
        flags: Sequence[str] = (),
        text: str | bytes = b"",
        merged: bool = False,
        cwd: Path | tuple[Path, Path] = SCRIPTS,
        kill: signal.Signals | None = None,
        env: dict[str, str] | None = None,
        entry: Sequence[str] = UNWATCHED,
    ) -> End:
        cwds = cwd if isinstance(cwd, tuple) else (cwd, cwd)
        plain = begin([sys.executable, *flags, *target], cwds[0], merged, env)
        ours = begin([sys.executable, *flags, *entry, *target], cwds[1], merged, env)
        if kill is not None:
            for process in (plain, ours):
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                process.send_signal(kill)
        text = text.encode() if isinstance(text, str) else text
        expected, got = end(plain, text), end(ours, text)
        assert got.out.splitlines() == expected.out.splitlines()
        assert got.err.splitlines() == expected.err.splitlines()
        assert got == expected
        return expected

    return run
