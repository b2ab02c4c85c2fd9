"""The HTML report in a real browser: whatever a script prints or is called, it stays text."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from halfstep.checks.judge import Summary
from halfstep.events import Attempt, Contribution, Finding, Place, ScalerMade, ScaleUpdated
from halfstep.record.history import History
from halfstep.report.document import document, dump
from halfstep.report.page import page

HOSTILE = "</script><script>document.title='owned'</script><b>&\"'"


def history(updates: int = 40) -> History:
    out = History()
    out.see(ScalerMade(scaler=1, scale=65536.0))
    for n in range(updates):
        out.see(Contribution(number=n, optimizers={1: 4}, scale=1024.0, loss=(2.0 - n / 40) * 1024))
        skipped = n in (0, 7)
        out.see(
            Attempt(optimizer=1, outcome="skipped" if skipped else "applied", norm=math.exp(math.sin(n)), lr=n / 40)
        )
        out.see(ScaleUpdated(scaler=1, before=65536.0, after=32768.0 if skipped else 65536.0))
    return out


def report(source: Path) -> str:
    source.write_text(f"x = 1\ny = {HOSTILE!r}\nz = 3\n")
    finding = Finding(
        rule="mean-of-means",
        severity="error",
        message=f"weights 3..42 {HOSTILE}",
        at=Place(str(source), 2, HOSTILE),
        count=1200,
        evidence={"a": float("nan"), HOSTILE: [1.5, HOSTILE]},
        fix=HOSTILE,
        module=HOSTILE,
    )
    summary = Summary(attempted=40, applied=38, skipped=2, micro_batches=40, weighed=40, sizes={1: 40})
    return page(f"train.py {HOSTILE}", [finding], summary, history(), {"command": HOSTILE})


class Shape(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_nothing_of_the_script_becomes_markup(tmp_path: Path) -> None:
    shape = Shape()
    shape.feed(report(tmp_path / "train.py"))
    assert "script" not in shape.tags
    assert shape.tags.count("b") == 1  # ours: Fix
    assert any(HOSTILE in text for text in shape.texts)
    assert shape.tags.count("svg") == 4


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report(tmp_path / "train.py"), encoding="utf-8")
    probe = tmp_path / "probe.html"
    # Measured inside the browser: curves have a size, the page does not scroll sideways, no script of theirs ran.
    measure = (
        "<script>addEventListener('load',()=>{const root=document.documentElement;"
        "const s=[...document.querySelectorAll('svg')].map(e=>e.getBoundingClientRect());"
        "document.body.dataset.out=JSON.stringify({svg:s.map(r=>[r.width,r.height]),"
        "wide:root.scrollWidth-root.clientWidth,title:document.title,"
        "h1:document.querySelector('h1').textContent,lines:document.querySelectorAll('pre span').length})})</script>"
    )
    probe.write_text(file.read_text(encoding="utf-8").replace("</body>", measure + "</body>"), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    done = subprocess.run(
        ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    found: dict[str, object] = {}

    class Body(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "body":
                found.update(json.loads(dict(attrs).get("data-out") or "{}"))

    Body().feed(done.stdout)
    assert found["h1"] == f"train.py {HOSTILE}"
    assert str(found["title"]).startswith("train.py </script>")
    assert found["wide"] == 0
    assert found["lines"] == 3
    sizes = found["svg"]
    assert isinstance(sizes, list)
    assert len(sizes) == 4
    assert all(w > 300 and h > 60 for w, h in sizes)


def test_the_json_is_strict(tmp_path: Path) -> None:
    finding = Finding(rule="r", severity="info", message="m", evidence={"n": float("inf"), "m": float("nan")})
    text = dump(document([finding], Summary(scale_path=[(0, float("inf"))]), 0, "script"))
    back = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert back["findings"][0]["evidence"] == {"n": "inf", "m": "nan"}
    assert back["exit"] == {"code": 0, "by": "script"}
    assert {"attempted", "applied", "skipped", "empty", "micro_batches", "judged"} <= set(back["summary"])
