"""The runs themselves, in processes of their own: what FP32 undoes, what each tells."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from halfstep.launch import Target
from halfstep.probe.runs.pair import Account, Process, read, wait

pytestmark = pytest.mark.processes

# Half precision by every door: autocast as region and decorator, a scaler, casts of models and tensors, factories, a
# default, numpy, halfstep's manager, a thread. PLAIN is the same script with none of them.
HALF = """
import threading
import numpy
import torch
from torch import nn
from halfstep import MixedPrecisionManager

torch.manual_seed(3)
half = torch.bfloat16
weights = torch.tensor(numpy.ones(8, dtype=numpy.float16))
first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25)).half()
second = nn.Linear(8, 4, dtype=half)
torch.set_default_dtype(half)
bias = torch.zeros(4).requires_grad_()
torch.set_default_dtype(torch.float32)
both = nn.Sequential(first, second).to(half)
optimizer = torch.optim.SGD([*both.parameters(), bias], lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

@torch.autocast("cpu", dtype=half)
def loss_of(x):
    return (both(x.to(half) * weights.type(half)) + bias).float().square().mean()

def forward(x):
    with torch.autocast("cpu", dtype=torch.float16):
        made.append(loss_of(x))

made = []
for k in range(4):
    thread = threading.Thread(target=forward, args=(torch.randn(4, 8),))
    thread.start(); thread.join()
    scaler.scale(made.pop()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(both.parameters(), 1.0)
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad(); schedule.step()
    print(f"k {k}")

manager = MixedPrecisionManager(precision="fp16", device="cpu", init_scale=2.0**40)  # overflows
model = nn.Linear(8, 2)
other = torch.optim.AdamW(model.parameters(), lr=0.1)
for k in range(2):
    with manager.context():
        loss = model(torch.randn(4, 8)).float().square().mean()
    manager.backward(loss)
    manager.step(model, other)
    manager.log(doubled=2 * k)
print([p.double().sum().item().hex() for p in (*both.parameters(), *model.parameters())])
"""
PLAIN = """
import torch
from torch import nn
from halfstep import MixedPrecisionManager

torch.manual_seed(3)
weights = torch.ones(8)
both = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25)), nn.Linear(8, 4))
bias = torch.zeros(4).requires_grad_()
optimizer = torch.optim.SGD([*both.parameters(), bias], lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

for k in range(4):
    ((both(torch.randn(4, 8) * weights) + bias).square().mean()).backward()
    nn.utils.clip_grad_norm_(both.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad(); schedule.step()

manager = MixedPrecisionManager(precision="fp32", device="cpu")
model = nn.Linear(8, 2)
other = torch.optim.AdamW(model.parameters(), lr=0.1)
for k in range(2):
    with manager.context():
        loss = model(torch.randn(4, 8)).float().square().mean()
    manager.backward(loss)
    manager.step(model, other)
    manager.log(doubled=2 * k)
"""


def begun(folder: Path, side: str, code: str, **options: float) -> Process:
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(code))
    return Process(side, folder, Target("script", str(folder / "train.py"), ["--own"]), seed=5, updates=None, **options)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, Account]:
    """All runs, begun together."""
    home = tmp_path_factory.mktemp("sides")
    runs = {
        "half": begun(home / "half", "own", HALF),
        "undone": begun(home / "undone", "fp32", HALF),
        "plain": begun(home / "plain", "own", PLAIN),
        "jittered": begun(home / "jittered", "jittered", PLAIN, jitter=0.02),
    }
    alone = subprocess.run([sys.executable, home / "half" / "train.py"], capture_output=True, text=True, check=True)
    (home / "alone.txt").write_text(alone.stdout)
    wait(list(runs.values()), lambda: None)
    accounts = {name: read(process.side, home / name, "k") for name, process in runs.items()}
    for name, account in accounts.items():
        assert account.status == 0, (name, (home / name / "output.txt").read_text())
    return accounts


def test_the_fp32_run_is_the_script_written_in_fp32_bit_for_bit(told):
    undone, plain = told["undone"].points, told["plain"].points
    assert len(undone) == len(plain) == 6
    for own, other in zip(undone, plain, strict=True):
        for name in ("optimizer", "micro", "loss", "norm", "layers", "weights", "random", "outcome", "lr", "position"):
            assert getattr(own, name) == getattr(other, name), name
    assert not told["undone"].halves
    assert told["undone"].half_parameters == 0
    assert {k for k, n in told["undone"].end["undone"].items() if n} == {
        "autocast regions", "casts", "managers", "scalers"}  # fmt: skip


def test_the_script_as_it_is_is_left_as_it_is(told):
    half = told["half"]
    assert set(half.halves) == {"float16", "bfloat16"}
    assert half.half_parameters > 0
    assert not half.end["undone"]
    assert [p.scale for p in half.points[:4]] == [2.0**10] * 4
    for own, fp32 in zip(half.points[:4], told["plain"].points[:4], strict=True):
        assert own.loss != fp32.loss
        assert own.loss == pytest.approx(fp32.loss, rel=0.05)
        assert own.norm == pytest.approx(fp32.norm, rel=0.1)  # unscaled, before clipping
        assert own.random == fp32.random


def test_the_script_as_it_is_computes_what_it_computes_alone(told):
    output = told["half"].output
    assert output.read_text() == (output.parents[1] / "alone.txt").read_text()


def test_what_a_manager_skips_is_told(told):
    assert [p.outcome for p in told["half"].points] == [*["applied"] * 4, "skipped", "skipped"]
    assert [p.micro for p in told["half"].points] == [p.micro for p in told["plain"].points]
    assert [p.data for p in told["half"].points[4:]] == [p.data for p in told["plain"].points[4:]]


def test_layers_are_modules_and_make_up_the_norm(told):
    first = told["plain"].points[0]
    assert set(first.layers) == {"0.0", "1", "optimizer 1, parameter 4"}
    assert sum(n * n for n in first.layers.values()) ** 0.5 == pytest.approx(first.norm)
    assert set(first.weights) == set(first.layers)


def test_numbers_come_from_the_output_and_from_the_manager(told):
    assert told["half"].metrics == {"doubled": [0.0, 2.0], "k": [0.0, 1.0, 2.0, 3.0]}


def test_random_errors_are_as_large_as_asked_and_leave_the_scripts_numbers_alone(told):
    plain, jittered = told["plain"].points, told["jittered"].points
    assert [p.random for p in jittered] == [p.random for p in plain]
    assert (jittered[0].loss, jittered[0].layers) == (plain[0].loss, plain[0].layers)
    for own, other in zip(jittered[1:4], plain[1:4], strict=True):
        assert own.loss != other.loss
        assert own.loss == pytest.approx(other.loss, rel=0.02)
