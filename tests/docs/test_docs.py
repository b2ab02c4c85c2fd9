"""Every ```python block of the README and of docs/*.md runs, in order, one namespace a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python *([^\n]*)\n(.*?)^``` *$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of each block that is not fenced ``python no-run``."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(2)), found[2]) for found in FENCE.finditer(text) if "no-run" not in found[1]
    ]


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if blocks(page)]


def test_pages_with_code_are_found() -> None:
    assert ROOT / "docs" / "engine.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": str(page)}
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)  # tracebacks name the page's own lines
