"""Processes and how they ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class End:
    """How a process ended: its exit status as `subprocess` tells it, and all it wrote."""

    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    env = dict(os.environ, PYTHONHASHSEED="0", **changes)
    for name in ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONUNBUFFERED", "PYTHONWARNINGS"):
        env.pop(name, None)
    return env


def begin(
    command: Sequence[str], cwd: Path, merged: bool = False, env: dict[str, str] | None = None
) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**(env or {})),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
    )


def end(process: subprocess.Popen, text: bytes = b"") -> End:
    try:
        out, err = process.communicate(text, timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return End(process.returncode, said(out), said(err or b""))


def said(output: bytes) -> str:
    """As text, without the addresses of objects."""
    return re.sub(r"\b0x[0-9a-f]+", "0x…", output.decode(errors="backslashreplace"))
