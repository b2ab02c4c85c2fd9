"""Every rule that is judged has a page, a script that breaks it and a twin that is right.

The scripts stand in tests/scripts/broken and tests/scripts/right, named RULE.py or RULE__variant.py. In a broken one
the line to be named carries the comment ``# expect: RULE`` (several lines may: any of them will do).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep.checks.registry import rules
from halfstep.checks.rules import page, sees
from tests.doctor import diagnose

SCRIPTS = Path(__file__).parents[1] / "scripts"
BROKEN = sorted((SCRIPTS / "broken").glob("*.py"))
RIGHT = sorted((SCRIPTS / "right").glob("*.py"))
NEAR = 2  # lines
SECTIONS = ("## What it is", "## How it hurts", "## Fix", "## Broken", "## Right")


def rule_of(path: Path) -> str:
    return path.stem.split("__")[0]


def expected(path: Path) -> set[int]:
    mark = re.compile(r"#\s*expect:\s*" + re.escape(rule_of(path)) + r"\b")
    return {n for n, line in enumerate(path.read_text().splitlines(), 1) if mark.search(line)}


@pytest.mark.parametrize("path", BROKEN, ids=lambda p: p.stem)
def test_broken_script_is_named_at_its_line(path: Path) -> None:
    lines = expected(path)
    assert lines, f"{path.name} marks no line with '# expect: {rule_of(path)}'"
    rule = rule_of(path)
    diagnosis = diagnose(path)
    wanted = diagnosis.findings if (sees(rule) or "").startswith("info") else diagnosis.loud
    right = [f for f in wanted if f.rule == rule]
    assert right, f"not found; instead {[(f.rule, f.at) for f in diagnosis.findings]}"
    assert any(f.at is not None and abs(f.at.line - n) <= NEAR for f in right for n in lines), [f.at for f in right]
    assert all(f.message and f.fix for f in right)
    assert {f.rule for f in diagnosis.loud} <= {rule}


@pytest.mark.parametrize("path", RIGHT, ids=lambda p: p.stem)
def test_right_script_is_silent(path: Path) -> None:
    diagnosis = diagnose(path)
    assert diagnosis.raised is None
    assert [(f.rule, f.at, f.message) for f in diagnosis.loud] == []
    assert not [f.message for f in diagnosis.findings if f.rule == "halfstep-internal"]


@pytest.mark.parametrize("rule", rules())
def test_rule_is_complete(rule: str) -> None:
    assert sees(rule) is not None, "its name is not in checks/rules.py"
    text = page(rule)
    assert text is not None, "it has no page"
    assert text.startswith(f"# {rule}\n")
    assert all(section in text for section in SECTIONS)
    assert rule in {rule_of(p) for p in BROKEN}, "no script breaks it"
    assert rule in {rule_of(p) for p in RIGHT}, "it has no right twin"
