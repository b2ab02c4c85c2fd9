"""``halfstep compare`` from the outside: the verdict on two examples, its files, statuses, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halfstep.cli import main
from halfstep.probe.runs.criterion import Criterion
from halfstep.probe.runs.pair import read
from halfstep.probe.runs.verdict import judge

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples" / "compare"
# Unseeded on purpose, prints for a tenth of a second each update, and starts a process of its own.
SLOW = """
import os, subprocess, sys, time, torch
print("own output", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.getcwd()])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for k in range(6000):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 4)).float().square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print("accuracy:", k, flush=True)
    time.sleep(0.02)
"""
UNSEEDED = """
import os, torch
draw = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for k in range(6):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 4, generator=draw)).float().square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def words(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "halfstep", "compare", *map(str, arguments)]


def compared(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(*arguments), cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, tuple[subprocess.CompletedProcess[str], Path]]:
    """Several comparisons, made at the same time."""
    home = tmp_path_factory.mktemp("compare")
    (home / "unseeded.py").write_text(UNSEEDED)
    (home / "usage.py").write_text("import sys; print('to standard output'); sys.exit('usage: --data FOLDER')")
    small = EXAMPLES / "small_gradients.py"
    lines = {
        "precision": ("--together", "--json", "p.json", "--html", "p.html", "--keep", "both", small),
        "rate": ("--json", "rate.json", "--keep", "kept", "--updates", "25", EXAMPLES / "high_rate.py"),
        "unseeded": ("--together", home / "unseeded.py"),
        "usage": (home / "usage.py", "--fast"),
    }
    with ThreadPoolExecutor(2) as pool:
        found = {name: pool.submit(compared, *line, cwd=home) for name, line in lines.items()}
        return {name: (future.result(), home) for name, future in found.items()}


def document(path: Path) -> dict:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no strict JSON"))


def test_precision_is_to_blame_and_the_layer_is_named(ends):
    end, home = ends["precision"]
    assert end.returncode == 3, end.stderr
    assert end.stdout.startswith("halfstep compare · precision is to blame\n")
    found = document(home / "p.json")
    assert found["exit"] == {"code": 3, "by": "halfstep"}
    assert found["verdict"]["blame"] == "precision"
    assert "not chance" in found["verdict"]["words"]
    assert found["precision"] == "float16"
    assert (found["parted"]["update"], found["parted"]["what"], found["parted"]["layer"]) == (1, "layer", "2")
    assert found["criterion"]["own"] > 1.5 * found["criterion"]["fp32"]
    assert found["same"] == {"start": True, "data_until": None, "random_until": None}
    runs = found["runs"]
    assert {run["attempted"] for run in runs.values()} == {40}
    assert [runs[side]["schedule"] for side in ("own", "fp32", "jittered")] == [39, 39, 39]
    assert {finding["rule"] for finding in runs["own"]["findings"]} == {"fp16-without-scaler"}
    assert len(found["updates"]) == 40
    first = found["updates"][0]
    assert first["own"]["loss"] == pytest.approx(first["fp32"]["loss"], rel=1e-3)


def test_the_page_shows_both_curves(ends):
    _, home = ends["precision"]
    page = (home / "p.html").read_text()
    assert "precision is to blame" in page
    assert page.count('class="curve beside"') >= 2
    assert "<script" not in page
    assert "small_gradients.py" in page


def test_the_learning_rate_is_not_precision(ends):
    end, home = ends["rate"]
    assert end.returncode == 0, end.stderr
    assert end.stdout.startswith("halfstep compare · precision is not to blame\nFP32 fails too")
    found = document(home / "rate.json")
    assert found["verdict"]["blame"] == "not precision"
    assert "learning rate" in found["verdict"]["words"]
    own, fp32 = found["runs"]["own"], found["runs"]["fp32"]
    assert own["attempted"] == fp32["attempted"] == fp32["applied"] == 25
    assert own["applied"] < 25
    assert found["criterion"]["fp32"] in ("nan", "inf")


def test_what_the_scripts_print_is_kept_apart(ends):
    end, home = ends["rate"]
    assert "update 10 loss" not in end.stdout
    assert end.stderr == ""
    for side in ("own", "fp32"):
        assert "update 10 loss" in (home / "kept" / side / "output.txt").read_text()


def test_other_data_is_said_and_nothing_else(ends):
    end, _ = ends["unseeded"]
    assert end.returncode == 4
    assert "it cannot be said\nthe two runs had other data from the first update on" in end.stdout
    assert "they part" not in end.stdout


def test_a_script_that_makes_no_update_shows_its_own_words(ends):
    end, _ = ends["usage"]
    assert end.returncode == 4
    assert "no update was seen in the script's own process: it ended with exit status 1" in end.stdout
    assert "usage: --data FOLDER" in end.stdout
    assert "in FP32: 0 attempted updates, 0 applied · not reached" in end.stdout


def test_the_criterion_can_be_a_number_that_the_script_prints(ends):
    _, home = ends["precision"]
    own, fp32, jittered = (read(side, home / "both" / side, "error") for side in ("own", "fp32", "jittered"))
    assert [len(run.metrics["error"]) for run in (own, fp32, jittered)] == [4, 4, 4]
    assert judge(Criterion("error", 1e-5), own, fp32, jittered=jittered).blame == "precision"
    assert judge(Criterion("error", 1e-3), own, fp32, jittered=jittered).blame == "not precision"


def test_ctrl_c_ends_all_and_tells_what_was_reached(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    line = words("--together", "--keep", "kept", "--metric", "accuracy", "--tolerance", "1000", "slow.py")
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    outputs = [tmp_path / "kept" / side / "output.txt" for side in ("own", "fp32")]
    deadline = time.monotonic() + 120
    while not all(o.exists() and o.read_text().count("accuracy") >= 3 for o in outputs):
        assert time.monotonic() < deadline, [o.read_text() for o in outputs if o.exists()]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "SIGINT: all runs have ended; what was reached is compared" in err
    assert "precision is not to blame" in out
    assert "criterion: accuracy, the last value" in out
    assert "allowed 1000 (as given)" in out
    for side in ("as it is", "in FP32"):
        reached = next(line for line in out.splitlines() if line.startswith(f"{side}: "))
        assert int(reached.removeprefix(f"{side}: ").split()[0].replace(",", "")) >= 2
    running = [_command(pid) for pid in os.listdir("/proc")] if os.path.isdir("/proc") else []
    texts = [(output.parent / "told.jsonl").read_text() for output in outputs]
    told = [json.loads(line) for text in texts for line in text.splitlines()]
    assert [t["code"] for t in told if t["kind"] == "end"] == [-2, -2]
    assert not [command for command in running if str(tmp_path) in command]


def _command(pid: str) -> str:
    """The command line of a process that runs here; empty for what is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") if pid.isdigit() else ""
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["compare"], "nothing to run"),
        (["compare", "--updates", "0", "x.py"], "1 or more"),
        (["compare", "--updates", "many", "x.py"], "1 or more"),
        (["compare", "--tolerance", "-1", "x.py"], "no distance"),
        (["compare", "--tolerance", "some", "x.py"], "no distance"),
        (["compare", "--seed", "-1", "x.py"], "0 to 2^32-1"),
        (["compare", "--seed", "5000000000", "x.py"], "0 to 2^32-1"),
        (["compare", "--metric", "", "x.py"], "needs a name"),
    ],
)
def test_wrong_use_is_status_2(line, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(line)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_what_is_not_there_or_cannot_be_written_is_refused_before_anything_runs(capsys, tmp_path):
    script = str(EXAMPLES / "high_rate.py")
    for line, said in (
        (["nope.py"], "no file nope.py"),
        ([str(tmp_path)], "no __main__.py"),
        (["-m", "no.such.module"], "no module no.such.module"),
    ):
        assert main(["compare", *line]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "file").touch()
    for option, name in (("--json", ""), ("--html", ""), ("--json", "file/x"), ("--keep", "file")):
        with pytest.raises(SystemExit) as left:
            main(["compare", option, str(tmp_path / name), script])
        assert left.value.code == 2
        assert str(tmp_path / name) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_cannot_run_twice_is_refused(capsys, monkeypatch):
    assert main(["compare", "-"]) == 2
    assert "standard input can be read only once" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compare", "x.py"]) == 2
    assert "without the launcher" in capsys.readouterr().err
