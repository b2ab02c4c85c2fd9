"""The house: a folder imports only from floors below it, and what must not know torch does not."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfstep

HOME = Path(__file__).parents[1] / "src" / "halfstep"
FLOOR = {
    "errors": 1, "events": 1, "weigh": 1, "launch": 1,
    "record": 2, "checks": 2,
    "watch": 3, "engine": 3, "report": 3,
    "probe": 4, "cli": 4,
}  # fmt: skip
MAY_NOT = {("watch", "engine"), ("engine", "watch"), ("engine", "checks"), ("report", "engine"), ("report", "watch")}
NO_TORCH = ("checks", "record", "report", "launch", "events", "errors")
LONGEST = 400


def rooms() -> Iterator[tuple[str, Path]]:
    for path in sorted(HOME.rglob("*.py")):
        first = path.relative_to(HOME).parts[0].removesuffix(".py")
        if first in FLOOR:
            yield first, path


def imported(path: Path) -> Iterator[str]:
    """Every module this file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("room", "path"), list(rooms()), ids=lambda v: v if isinstance(v, str) else v.name)
def test_a_room_imports_only_from_below(room: str, path: Path) -> None:
    for module in imported(path):
        parts = module.split(".")
        if room in NO_TORCH:
            assert parts[0] != "torch", f"{path.name} imports torch"
        if parts[0] != "halfstep" or len(parts) < 2 or parts[1] not in FLOOR or parts[1] == room:
            continue
        assert (room, parts[1]) not in MAY_NOT, f"{path.name} imports {module}"
        assert FLOOR[parts[1]] <= FLOOR[room], f"{path.name} (floor {FLOOR[room]}) imports {module}"


def test_the_front_door_is_used_in_one_place() -> None:
    """``halfstep``'s own names reach every floor: from below, only for ``manager.preflight``, when it is called."""
    front = {"halfstep", *(f"halfstep.{name}" for name in halfstep.__all__ if name != "watch")}
    below = [path for room, path in rooms() if FLOOR[room] < 4]
    assert {path.name for path in below if not front.isdisjoint(imported(path))} == {"records.py"}


@pytest.mark.parametrize(("room", "path"), list(rooms()), ids=lambda v: v if isinstance(v, str) else v.name)
def test_a_file_can_be_read_in_one_go(room: str, path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


def test_importing_halfstep_or_explaining_a_rule_needs_no_torch() -> None:
    code = (
        "import sys, halfstep, halfstep.checks.registry as r, halfstep.report.page, halfstep.launch; r.checks();"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
