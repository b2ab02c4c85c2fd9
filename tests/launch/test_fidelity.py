"""Every script ends under halfstep as it ends under plain python: same output, same tracebacks, same exit status."""

from __future__ import annotations

import os
import signal
import sys
import zipfile

import pytest

from tests.launch.ends import SCRIPTS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="exit statuses and signals of POSIX")

KINDS = ["plain", "context", "cause", "note", "group", "broken", "assert", "base", "import", "exec", "compile"]


def test_names_of_a_script(same):
    for target in ("names.py", "./names.py", "../scripts/names.py", str(SCRIPTS / "names.py")):
        assert "What a script is told" in same(target, "a", "--json", "--", "-m").out


def test_names_of_a_linked_script(same, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "link.py").symlink_to(SCRIPTS / "names.py")
    assert str(SCRIPTS) in same("linked/link.py", cwd=tmp_path).out


@pytest.mark.parametrize(
    "flags", [["-P"], ["-O"], ["-OO", "-u"], ["-W", "error", "-X", "dev"], ["-s", "-B", "-q"], ["-bb"]], ids="".join
)
def test_names_under_flags(same, flags):
    assert same("names.py", flags=flags).code == 0


def test_names_of_code_and_stdin(same):
    source = (SCRIPTS / "names.py").read_text()
    assert "['-c', 'a', '-m']" in same("-c", source, "a", "-m").out
    assert "['-', 'a', '--json']" in same("-", "a", "--json", text=source).out


def test_names_of_a_module(same):
    assert same("-m", "names", "a", "-c").code == 0
    assert same("-m", "names", "a", flags=["-P"]).code == 1  # nothing but the working directory holds it
    assert "package pkg -m" in same("-m", "pkg.part", "x").out
    assert "pkg.__main__ pkg" in same("-m", "pkg", "--fail-on").out


@pytest.mark.parametrize(
    "target", ["absent", "pkg.absent", "absent.part", "failing", "failing.part", "pkg.part.deeper", "names.py", ""]
)
def test_module_that_cannot_run(same, target):
    assert same("-m", target).code == 1


@pytest.mark.parametrize(
    "target",
    [("pkg.part", "fail"), ("pkg", "fail"), ("pkg.part", "exit"), ("raises", "cause"), ("interrupts", "raise")],
)
def test_module_that_fails(same, target):
    assert same("-m", *target, merged=True).code in (1, -signal.SIGINT)


def test_folder_and_zip(same, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    source = (SCRIPTS / "names.py").read_text() + "\nimport beside, sys\nif 'fail' in sys.argv: beside.fail()\n"
    (folder / "__main__.py").write_text(source)
    (folder / "beside.py").write_text("def fail():\n    raise ValueError(__file__)\n")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        for name in ("__main__.py", "beside.py"):
            packed.write(folder / name, name)
    for target in ("folder", "./folder", "packed.zip", str(folder)):
        assert same(target, "a", cwd=tmp_path).code == 0
        assert "ValueError" in same(target, "fail", cwd=tmp_path).err


def test_script_that_cannot_run(same, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "file.py").write_text("")
    (tmp_path / "bad.zip").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    (tmp_path / "wrong.pyc").write_bytes(b"not this python's")
    assert same("absent.py", cwd=tmp_path).code == 2
    assert same("loop.py", cwd=tmp_path).code == 2
    assert same("file.py/deeper.py", cwd=tmp_path).code == 2
    assert same("empty", cwd=tmp_path).code == 1
    assert same("bad.zip", cwd=tmp_path).code == 1
    assert same("wrong.pyc", cwd=tmp_path).code == 1
    if os.geteuid():
        (tmp_path / "file.py").chmod(0)
        assert same("file.py", cwd=tmp_path).code == 2


def test_compiled_script(same, tmp_path):
    import py_compile

    for name in ("names.pyc", "renamed"):
        py_compile.compile(str(SCRIPTS / "names.py"), cfile=str(tmp_path / name))
        assert "SourcelessFileLoader" in same(name, cwd=tmp_path).out


UNREADABLE = {
    "no encoding": b'x = 1\n\nprint("\xe9")\n',
    "unknown encoding": b"# -*- coding: nope -*-\n",
    "not in its encoding": b'# coding: ascii\nx = "\xc3\xa9"\n',
    "no ASCII superset": b"# coding: utf-16\n",
    "byte-order mark and another encoding": b"\xef\xbb\xbf# coding: latin-1\n",
    "null byte": b"x = 1\0\nprint(2)\n",
    "open bracket": b"print(1)\nx = (1,\n",
    "open string": b'x = """abc\n',
    "tabs and spaces": b"if 1:\n\tx\n        y\n",
    "indent": b"  x = 1\n",
    "return": b"print(1)\nreturn 1",
    "assignment": b"None = 1\n",
    "late future": b"x = 1\nfrom __future__ import annotations\n",
    "unknown future": b"from __future__ import absent\n",
    "escape": b'x = "\\N{no such name}"\n',
    "latin text": b'# coding: latin-1\nx = "\xe9\xe9" 1\n',
    "form feed": b"x = 1\n\n\n\x0cy = $\n",
    "f-string": b'x = 1\nf"{a b}"\n',
    "nested": b"(" * 300 + b")" * 300,
    "escape, then open": b'x = "\\d"\ny = (\n',
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_script_that_does_not_parse(same, tmp_path, name):
    (tmp_path / "bad.py").write_bytes(UNREADABLE[name])
    end = same("bad.py", cwd=tmp_path)
    assert end.code == 1
    assert "Traceback" not in end.err or name == "nested"


def test_code_stdin_and_module_that_do_not_parse(same, tmp_path):
    (tmp_path / "bad.py").write_bytes(UNREADABLE["no encoding"])
    assert same("-m", "bad", cwd=tmp_path).code == 1
    for name in ("open bracket", "no encoding", "unknown encoding", "null byte"):
        assert same("-", text=UNREADABLE[name]).code == 1
    for source in ("x = (\n", "  x = 1\n y", "# coding: nope\nprint(1", "return"):
        assert same("-c", source).code == 1


READABLE = {
    "latin-1": '# coding: latin-1\nprint(ascii("é"), __doc__)\n'.encode("latin-1"),
    "byte-order mark": b'\xef\xbb\xbf"doc"\nprint("\xc3\xa9", __doc__)\n',
    "line ends": b"print(1)\r\nprint(2)\rprint(3)\r\n1/0",
    "warnings": b'if 1 is 1: print("\\d")\nassert (1, "always")\n',
    "empty": b"",
    "no newline": b"import sys; sys.exit(3)",
    "form feed": b"x = 1\n\x0cprint(x)\n1/0\n",
    "euc": "# vim: set fileencoding=euc-jp :\nprint('日本', 1/0)\n".encode("euc-jp"),
    "non-ASCII traceback": "naïve = 'ünïcödé' * 2; print(naïve); 名 = 1 / 0\n".encode(),
}


@pytest.mark.parametrize("name", READABLE)
def test_encodings(same, tmp_path, name):
    (tmp_path / "ok é.py").write_bytes(READABLE[name])
    same("ok é.py", cwd=tmp_path)
    if name not in ("latin-1", "euc"):  # python itself reads these from files only
        same("-", cwd=tmp_path, text=READABLE[name])
    same("-m", "ok é", cwd=tmp_path)


@pytest.mark.parametrize("kind", [*KINDS, "generator", "stop"])
def test_tracebacks(same, kind):
    end = same("raises.py", kind, merged=True)
    assert end.code == 1
    assert end.out.startswith("before\nTraceback") or kind in ("group",)


def test_traceback_of_code_and_stdin(same):
    source = (SCRIPTS / "raises.py").read_text()
    for kind in ("cause", "exec", "group"):
        assert same("-c", source, kind, merged=True).code == 1
        assert same("-", kind, merged=True, text=source).code == 1


@pytest.mark.parametrize("target", [["recursion.py"], ["recursion.py", "raised"], ["-m", "recursion"]], ids=" ".join)
def test_recursion(same, target):
    assert "more times" in same(*target).err


EXITS = {
    "none": 0,
    "None": 0,
    "0": 0,
    "7": 7,
    "-1": 255,
    "256": 0,
    "True": 1,
    "bare": 0,
    "two": 1,
    **dict.fromkeys(("'text'", "''", "1.0", "b'x'", "'\\udcff'", "object", "while"), 1),
    "subclass": 5,
    "finally": 4,
    "builtin": 6,
    "atexit": 3,
    # Later pythons end on such numbers with an error of their own left pending.
    **(dict.fromkeys(("2**70", "-2**70"), 255) if sys.version_info < (3, 12) else {}),
}


@pytest.mark.parametrize("kind", EXITS)
def test_exit_values(same, kind):
    assert same("exits.py", kind, merged=True).code == EXITS[kind]


@pytest.mark.parametrize(
    ("kind", "code"), [("0", 0), ("3", 3), ("256 + 5", 5), ("-1", 255), ("thread", 7), ("True", 1)]
)
def test_os_exit(same, kind, code):
    end = same("os_exits.py", kind)
    assert (end.code, end.out) == (code, "flushed\n")


def test_os_exit_with_what_it_does_not_take(same):
    assert same("os_exits.py", "wrong").code == 1


@pytest.mark.parametrize("kind", ["shows", "raises", "chains", "exits", "missing", "none", "native", "interrupt"])
def test_excepthooks(same, kind):
    end = same("hooks.py", kind, merged=True)
    assert end.code == {"exits": 8, "interrupt": -signal.SIGINT}.get(kind, 1)


@pytest.mark.parametrize("words", ["", "fails", "exits", "hook fails", "raise", "raise fails"])
def test_threads(same, words):
    end = same("threads.py", *words.split(), merged=True)
    assert "late 3 True" in end.out
    assert end.out.rstrip().endswith("atexit 3")


def test_thread_and_finaliser_errors(same):
    assert same("raises_late.py", merged=True).code == 0


def test_exit_handlers(same, tmp_path):
    for name in ("plain", "ours"):
        (tmp_path / name).mkdir()
    end = same(str(SCRIPTS / "at_exit.py"), "left.txt", cwd=(tmp_path / "plain", tmp_path / "ours"), merged=True)
    assert "runs second\nruns last False" in end.out
    assert "deleted kept" in end.out
    assert (tmp_path / "ours" / "left.txt").read_text() == "written by nobody's close"


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pickling_and_processes(same, method):
    end = same("pickles.py", method)
    assert end.code == 0
    assert ("__mp_main__" in end.out) == (method != "fork")


@pytest.mark.processes
@pytest.mark.parametrize("how", ["exit", "_exit", "raise", "term", "falls"])
def test_forks(same, how):
    end = same("forks.py", how, merged=True)
    assert end.code == 0
    assert end.out.count("atexit parent") == 1


INTERRUPTED = -signal.SIGINT


INTERRUPTS = {
    **dict.fromkeys(("raise", "default", "asyncio"), INTERRUPTED),
    "caught": 0,
    "handled": 0,
    "exit": 130,
    "chained": 1,
    "subclass": 1,
}


@pytest.mark.parametrize("how", INTERRUPTS)
def test_interrupts(same, how):
    assert same("interrupts.py", how).code == INTERRUPTS[how]


TERMINATIONS = {
    **dict.fromkeys(("default", "again"), -signal.SIGTERM),
    "handled": 1,
    "ignored": 0,
    "chained": 0,
    "killed": -signal.SIGKILL,
}


@pytest.mark.parametrize("how", TERMINATIONS)
def test_terminations(same, how):
    assert same("terminates.py", how).code == TERMINATIONS[how]


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_from_outside(same, kill):
    end = same("sleeps.py", kill=kill)
    assert end.code == -kill
    assert ("finally" in end.out) == (kill is signal.SIGINT)


def test_interrupt_while_threads_are_joined(same):
    assert "KeyboardInterrupt" in same("sleeps.py", "thread", kill=signal.SIGINT).err


@pytest.mark.parametrize("how", ["", "raise", "exit", "closed", "stderr", "none", "raise-none", "swapped", "failing"])
def test_output_keeps_its_order(same, how):
    assert "before the child\nchild ['-c']\n" in same("buffers.py", how, merged=True).out
    same("buffers.py", how)


@pytest.mark.parametrize(
    "name", ["shapes", "plain_annotations", "reads_itself", "warns", "tests_itself", "replaces_main"]
)
def test_scripts(same, name):
    assert same(f"{name}.py").code == (name == "reads_itself")
    same("-m", name)


@pytest.mark.parametrize(
    "flags", [["-W", "error"], ["-W", "ignore"], ["-W", "always::DeprecationWarning"], ["-X", "dev"]], ids=" ".join
)
def test_warnings_under_flags(same, flags):
    same("warns.py", flags=flags)


def test_input(same):
    assert "'Ada'" in same("asks.py", text="Ada\nmore\n").out
    assert same("-c", (SCRIPTS / "asks.py").read_text(), text="Ada\nmore\n").code == 0
    assert "EOFError" in same("-", text=(SCRIPTS / "asks.py").read_text()).out


def test_options_of_the_script_are_its_own(same):
    assert "json='x'" in same("options.py", "--json", "x", "--updates", "3", "-m", "y", "--", "--html").out
    assert "usage: options.py" in same("options.py", "--help").out
    assert same("options.py", "--unwatched").code == 2
    assert "json='x'" in same("-m", "options", "--json", "x").out


def test_console_command(same, tmp_path):
    """The installed command is a script of its own, whose folder python puts on the path."""
    command = tmp_path / "halfstep"
    command.write_text("import sys\nfrom halfstep.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    entry = (str(command), "run", "--unwatched")
    assert same("names.py", "a", entry=entry).code == 0
    assert same("-m", "pkg", "fail", entry=entry).code == 1
    assert same("raises.py", "cause", entry=entry, merged=True).code == 1
    assert same("interrupts.py", "raise", entry=entry).code == -signal.SIGINT
    assert same("recursion.py", entry=entry).code == 1
    assert same("exits.py", "'text'", entry=entry).code == 1
    assert same("hooks.py", "interrupt", entry=entry).code == -signal.SIGINT
