"""The whole of ``halfstep run``: the script's own end and output, then the report, whichever way the script ends."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.launch.ends import SCRIPTS, End, begin, end

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="exit statuses and signals of POSIX")


def run(tmp_path, *words: str) -> tuple[End, dict]:
    out = tmp_path / "found.json"
    process = begin([sys.executable, "-m", "halfstep", "run", "--json", str(out), *words], SCRIPTS)
    ended = end(process)
    return ended, json.loads(out.read_text())


def plain(*words: str) -> End:
    return end(begin([sys.executable, *words], SCRIPTS))


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("_exit", 4), ("term", -signal.SIGTERM)])
def test_the_report_survives_every_end(tmp_path, how, code):
    ended, found = run(tmp_path, "trains.py", how)
    expected = plain("trains.py", how) if how == "raise" else None
    assert ended.code == code
    assert found["exit"] == {"code": code, "by": "script"}
    assert found["summary"]["applied"] == 4
    assert "ended 2\n" in ended.out
    report = ended.err.splitlines()[-1]
    assert report.startswith("halfstep · clean")
    if expected is not None:
        assert (ended.code, ended.out) == (expected.code, expected.out)
        assert ended.err == f"{expected.err}{report}\n"


def test_updates_ends_the_run_as_if_well(tmp_path):
    ended, found = run(tmp_path, "--updates", "2", "trains.py", "raise")
    assert ended.code == 0
    assert found["exit"] == {"code": 0, "by": "halfstep"}
    assert found["summary"]["applied"] == 2
    assert ended.out.splitlines()[1:] == ["ended 2"]


def test_fail_on_speaks_after_a_normal_end_only(tmp_path):
    ended, found = run(tmp_path, "--fail-on", "error", "trains.py", "broken")
    assert [f["severity"] for f in found["findings"]] == ["error"]
    assert found["findings"][0]["line"] == 19
    assert ended.code == 3
    assert found["exit"] == {"code": 3, "by": "halfstep"}


def test_a_script_without_torch_is_left_without_it(tmp_path):
    ended, found = run(tmp_path, "-c", "import sys; print('torch' in sys.modules)")
    assert (ended.code, ended.out) == (0, "False\n")
    assert found["findings"] == []
    assert found["summary"]["attempted"] == 0
