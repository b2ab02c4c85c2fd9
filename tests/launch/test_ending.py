"""What a watcher is told at the end of a run, and that it is told once, last, whichever way the run ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from halfstep.launch import when_imported
from tests.launch.ends import SCRIPTS, End, begin, end

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="exit statuses and signals of POSIX")


def told(word: str, *target: str, cwd: Path = SCRIPTS, kill: signal.Signals | None = None) -> End:
    process = begin([sys.executable, str(Path(__file__).with_name("told.py")), word, *target], cwd, merged=True)
    if kill is not None:
        assert process.stdout is not None
        while process.stdout.readline() != b"ready\n":
            assert process.poll() is None
        process.send_signal(kill)
    return end(process)


ENDS = {
    "exits.py none": 0,
    "exits.py 7": 7,
    "exits.py 'text'": 1,
    "exits.py 2**70": 255,
    "raises.py cause": 1,
    "shapes.py": 0,
    "absent.py": 2,
    "threads.py raise fails": 1,
    "hooks.py exits": 8,
    "hooks.py raises": 1,
    "hooks.py interrupt": -signal.SIGINT,
    "interrupts.py raise": -signal.SIGINT,
    "interrupts.py exit": 130,
    "interrupts.py subclass": 1,
    "terminates.py default": -signal.SIGTERM,
    "terminates.py handled": 1,
    "terminates.py ignored": 0,
    "os_exits.py 3": 3,
    "os_exits.py thread": 7,
    "os_exits.py wrong": 1,
    "os_exits.py -1": 255,
}


@pytest.mark.parametrize("target", ENDS)
def test_finish_is_told_once_and_last(target):
    code = ENDS[target]
    got = told("-", *target.split())
    lines = got.out.splitlines()
    ends = [line for line in lines if line.startswith("told finish")]
    assert (got.code, ends) == (code, [f"told finish {code} script"])
    after = lines[lines.index(ends[0]) + 1 :]
    assert not [line for line in after if "atexit" in line or "Traceback" in line]


def test_before_is_told_when_all_is_ready():
    line = told("-", "shapes.py", "a").out.splitlines()[0]
    assert line == "told before Target(kind='script', value='shapes.py', argv=['a']) ['shapes.py', 'a'] None"


def test_raised_gets_the_scripts_frames_only():
    assert "told raised ZeroDivisionError <module> outer inner\nTraceback" in told("-", "raises.py", "plain").out
    assert "told raised KeyboardInterrupt" in told("-", "interrupts.py", "raise").out
    assert "raised" not in told("-", "exits.py", "7").out


def test_hidden_wrappers_are_in_no_traceback():
    got = told("-", "wrapped.py")
    assert got.out.count("in fail") == 2
    assert "in wrapper" not in got.out
    assert "told raised ExceptionGroup <module> outer\n" in got.out


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM])
def test_signals_from_outside(kill):
    got = told("-", "sleeps.py", kill=kill)
    assert got.code == -kill
    assert got.out.endswith(f"told finish {-kill} script\n")


@pytest.mark.parametrize(
    ("how", "code", "by"), [("main", 0, "halfstep"), ("thread", 5, "script"), ("leaves", 6, "script")]
)
def test_enough_is_a_normal_end(how, code, by):
    got = told("-", "enough.py", how)
    assert got.code == code
    assert got.out.splitlines()[1:] == ["finally", "atexit", f"told finish {code} {by}"]


def test_verdict_counts_after_a_normal_end_only(tmp_path):
    assert told("-", "shapes.py").code == 0
    assert told("verdict=3", "shapes.py").code == 3
    assert told("verdict=3", "exits.py", "none").code == 3
    assert told("verdict=3", "enough.py", "main").code == 3
    assert told("verdict=0", "shapes.py").code == 0
    assert told("verdict=3", "exits.py", "7").code == 7
    assert told("verdict=3", "raises.py", "plain").code == 1
    assert told("verdict=3", "interrupts.py", "raise").code == -signal.SIGINT


def test_verdict_leaves_the_rest_of_the_end_to_python(tmp_path):
    got = told("verdict=3", str(SCRIPTS / "at_exit.py"), "left.txt", cwd=tmp_path)
    assert got.code == 3
    assert "runs last False __main__ True\ntold finish 0 script\n" in got.out
    assert "deleted kept" in got.out
    assert (tmp_path / "left.txt").read_text() == "written by nobody's close"
    assert "late 3 True None\natexit 3\ntold finish 0 script" in told("verdict=3", "threads.py").out


@pytest.mark.parametrize(("verb", "script"), [("before", "shapes"), ("raised", "recursion"), ("finish", "shapes")])
def test_a_fault_of_the_watcher_never_fails_the_run(verb, script):
    got = told(f"fails={verb}", f"{script}.py")
    assert got.code == (script == "recursion")
    assert got.out.endswith(f"halfstep: its own {verb} failed: ValueError: own fault in {verb}\n")


@pytest.mark.processes
@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("_exit", 4), ("term", -15), ("falls", 0)])
def test_a_forked_child_is_told_to_its_own_hooks(how, code):
    got = told("forks", "forks.py", how).out.splitlines()
    assert [line for line in got if "finish" in line] == [f"child finish {code} script", "told finish 0 script"]
    silent = told("-", "forks.py", how)
    assert silent.out.count("finish") == 1
    assert f"child ended with {code}" in silent.out
    assert told("fails=on_fork", "forks.py", how).out.count("finish") == 1


def test_arrival_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "arriving.py").write_text("value = 1\n")
    (tmp_path / "failing_once.py").write_text(
        "import builtins\nbuiltins.tries = getattr(builtins, 'tries', 0) + 1\n1 / (tries - 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before, seen = list(sys.meta_path), []
    when_imported("arriving", lambda: seen.append(sys.modules["arriving"].value))
    import json  # noqa: F401

    assert seen == []
    import arriving

    assert seen == [1]
    assert sys.meta_path == before
    assert type(arriving.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(arriving.__loader__)
    when_imported("arriving", lambda: seen.append(2))
    assert seen == [1, 2]

    when_imported("failing_once", lambda: seen.append(3))
    with pytest.raises(ZeroDivisionError):
        import failing_once
    assert seen == [1, 2]
    import failing_once  # noqa: F401

    assert seen == [1, 2, 3]
    assert sys.meta_path == before
