"""The story of the convolution that explodes: the doctor names it, the comparison agrees, the cure is proved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import overflow

EXPLOSION = Path(__file__).parents[2] / "examples" / "explosion.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict:
    record = tmp_path_factory.mktemp("overflow") / "overflow.json"
    assert overflow.main(["--updates", "32", "--json", str(record)]) == 0
    return json.loads(record.read_text())


def test_compare_names_the_convolution(told: dict) -> None:
    found = told["comparison"]
    assert (found["overflow"]["module"], found["overflow"]["operator"]) == ("up", "convolution")
    assert found["overflow"]["exact"] > 65504 > found["overflow"]["peak"]
    assert found["to_blame"] is True
    assert found["parted"] == "up"


def test_the_cure_says_what_helps_and_what_cannot(told: dict) -> None:
    helps = {remedy["name"]: remedy["helps"] for remedy in told["cure"]["remedies"]}
    assert told["cure"]["line"] == 'manager.keep_fp32(model, "up")'
    assert helps["island"] is helps["normalisation"] is helps["BF16"] is True
    assert helps["first scale"] is helps["clipping"] is helps["smaller micro-batch"] is False
    assert helps["lower learning rate"] is False  # at this moment the weights are too large already


def test_the_remedies_hold_over_whole_runs_and_the_broken_one_does_not(told: dict) -> None:
    runs = {run["name"]: run for run in told["runs"]}
    assert runs["FP16 as it is"]["applied"] < 20
    for name, run in runs.items():
        if name != "FP16 as it is":
            assert run["applied"] == run["attempted"] == 32, name
    both = next(run for name, run in runs.items() if "both" in name)
    assert both["loss"] < 0.8 * runs["FP32 as it is"]["loss"]  # the rate was the fault, FP32 only bore it


def test_updates_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        overflow.main(["--updates", "4"])
    assert ended.value.code == 2
    assert "--updates 4" in capsys.readouterr().err


@pytest.mark.processes
def test_the_doctor_names_module_operator_and_line(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "run", "--json", str(found), str(EXPLOSION), "24"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (error,) = (f for f in json.loads(found.read_text())["findings"] if f["severity"] == "error")
    assert (error["rule"], error["module"], error["operator"]) == ("forward-overflow", "model.up", "convolution")
    assert "self.up(both)" in EXPLOSION.read_text().splitlines()[error["line"] - 1]
    assert "nan" in done.stdout
