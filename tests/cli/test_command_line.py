"""The command line: what belongs to halfstep and what to the script, help that teaches, wrong use."""

from __future__ import annotations

import argparse
import gzip

import pytest

from halfstep.cli import NAMES, main, subcommands
from halfstep.cli.run import Run
from halfstep.cli.target import add_target, split
from halfstep.cli.watched import write
from halfstep.launch import Target


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="halfstep run")
    Run().add_arguments(made)
    add_target(made)
    return made


@pytest.mark.parametrize(
    ("line", "own", "target"),
    [
        ("x.py", "", Target("script", "x.py")),
        ("x.py --json a -m b", "", Target("script", "x.py", ["--json", "a", "-m", "b"])),
        ("--json a x.py --json b", "--json a", Target("script", "x.py", ["--json", "b"])),
        ("--json=a x.py -- y", "--json=a", Target("script", "x.py", ["--", "y"])),
        ("--json a -- x.py -h", "--json a", Target("script", "x.py", ["-h"])),
        ("-- -x.py y", "", Target("script", "-x.py", ["y"])),
        ("-- -m y", "", Target("script", "-m", ["y"])),
        ("--updates 3 -m a.b -c --html", "--updates 3", Target("module", "a.b", ["-c", "--html"])),
        ("-ma.b -x", "", Target("module", "a.b", ["-x"])),
        ("--fail-on error -c pass a", "--fail-on error", Target("code", "pass", ["a"])),
        ("-cpass", "", Target("code", "pass")),
        ("--unwatched - a", "--unwatched", Target("stdin", "-", ["a"])),
        ("--json -m x.py", "--json -m", Target("script", "x.py")),
        ("--json a", "--json a", None),
        ("--json a --", "--json a", None),
        ("", "", None),
    ],
)
def test_options_and_target(line, own, target):
    assert split(line.split(), parser()) == (own.split(), target)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "nothing to run"),
        (["run", "--json", "x"], "nothing to run"),
        (["run", "-m"], "-m: expected one argument"),
        (["run", "--nope", "x.py"], "--nope"),
        (["run", "--updates", "0", "x.py"], "1 or more"),
        (["run", "--updates", "few", "x.py"], "few"),
        (["run", "--fail-on", "all", "x.py"], "'never'"),
        (["run", "--upd", "3", "x.py"], "--upd"),
        (["run", "--json", ".", "x.py"], "'.' is a folder"),
        (["run", "--html", f"{__file__}/x.html", "x.py"], "is no folder"),
        (["run", "--record", __file__, "x.py"], "is a file"),
        (["bench", "--json", "."], "'.' is a folder"),
        (["bench", "--seconds", "few"], "few is no positive number"),
        (["report", "here", "--html", "."], "'.' is a folder"),
        (["train.py"], "halfstep run train.py"),
        (["walk"], "no command 'walk'"),
        (["--nope"], "--nope"),
    ],
)
def test_wrong_use_is_status_2(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_help_teaches(capsys):
    assert main([]) == 2
    table = capsys.readouterr().err
    for name, command in subcommands().items():
        assert f"\n  {name} " in table
        assert command.name == name
        assert f"  halfstep {name}" in command.description
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert f"  halfstep {name}" in capsys.readouterr().out
    assert list(subcommands()) == [name for name in NAMES if name in subcommands()]
    assert "run" in subcommands()


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("halfstep ")


def test_an_unknown_rule_is_answered_with_those_that_hold_the_word(capsys):
    assert main(["explain", "mean"]) == 2
    assert "did you mean mean-of-means, mean-of-means-across-replicas?" in capsys.readouterr().err
    assert main(["explain", "mean-off-means"]) == 2
    assert "did you mean mean-of-means" in capsys.readouterr().err


def test_what_explains_a_rule_points_to_no_page_that_is_not_there(capsys):
    assert main(["explain"]) == 0
    assert "law " not in capsys.readouterr().out


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "report.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "report.json", "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("content", [b"garbage", gzip.compress(b"another file\nof lines\n")])
def test_a_record_that_is_none_any_more_is_an_error(content, tmp_path, capsys):
    (tmp_path / "events-rank0.jsonl.gz").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 1
    assert "events-rank0.jsonl.gz cannot be read" in capsys.readouterr().err
