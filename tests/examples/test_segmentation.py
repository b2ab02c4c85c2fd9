"""The main job: real pictures, exact masks, two runs side by side, and what it says about them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import scenes as pictures
import segmentation
from scenes import INK, SIDE, VOID, scenes

SCRIPT = Path(segmentation.__file__)


def test_scenes_need_no_network_and_are_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    images, labels = scenes(6, seed=3)
    again, _ = scenes(6, seed=3)
    assert torch.equal(images, again)
    assert not torch.equal(images, scenes(6, seed=4)[0])
    assert not torch.equal(images, scenes(6, seed=3, validation=True)[0])
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.shape == (6, 3, SIDE, SIDE)
    assert -0.5 <= images.min() < -0.1 < 0.1 < images.max() <= 0.5
    assert set(labels.unique().tolist()) == {0, INK, VOID}


def test_training_and_validation_share_no_picture_and_no_digit() -> None:
    assert not set(pictures.TRAINING_PICTURES) & set(pictures.VALIDATION_PICTURES)
    digits = range(1797)
    assert not set(digits[pictures.TRAINING_DIGITS]) & set(digits[pictures.VALIDATION_DIGITS])


def test_the_mask_is_exactly_the_ink() -> None:
    images, labels = scenes(40, seed=0)
    for image, label in zip(images, labels, strict=True):
        inside = label != VOID
        height, width = int(inside.any(1).sum()), int(inside.any(0).sum())
        assert inside[:height, :width].all()  # padding is a border on the right and below,
        assert int(inside.sum()) == height * width
        assert (image.permute(1, 2, 0)[~inside] == 0).all()  # and grey
    first = images[:1].clone()
    ink = labels[0] == INK
    colours = first[0].permute(1, 2, 0)[ink]
    most = max(int((colours == colour).all(1).sum()) for colour in colours.unique(dim=0))
    assert most > 0.15 * len(colours)  # at most three digits, each of one opaque ink apart from its soft edge


def test_an_update_is_the_gradient_of_the_mean_over_all_supervised_pixels_the_short_group_included() -> None:
    data = TensorDataset(*scenes(34, seed=1))  # 5 micro-batches, the last of 2: groups of 3 and 2
    training = segmentation.Training("fp32", data, updates=4, seed=5, width=4)
    order = torch.Generator().manual_seed(5)
    batches = list(DataLoader(data, segmentation.MICRO_BATCH, shuffle=True, generator=order))
    for group in (batches[:3], batches[3:]):
        images, labels = (torch.cat(parts) for parts in zip(*group, strict=True))
        summed = F.cross_entropy(training.model(images), labels, ignore_index=VOID, reduction="sum")
        supervised = int((labels != VOID).sum())
        gradients = torch.autograd.grad(summed / supervised, list(training.model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        update = training.advance()
        assert update.examples == len(images)
        assert update.weight == supervised
        assert update.loss == pytest.approx(float(summed.detach()) / supervised, rel=1e-5)
        assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_a_quick_run_of_both_precisions_and_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert segmentation.main(["--quick", "--json", str(tmp_path / "new" / "record.json")]) == 0
    shown = capsys.readouterr().out
    assert "validation IoU" in shown
    assert "examples per second" in shown
    assert "bf16 against fp32" in shown
    written = json.loads((tmp_path / "new" / "record.json").read_text())
    half, full = written["runs"]
    assert (half["precision"], full["precision"]) == ("bf16", "fp32")
    for run in (half, full):
        record = run["record"]
        assert record["status"] == "tried"
        assert record["counters"]["applied"] == record["counters"]["attempted"] == 8
        assert record["counters"]["micro_batches"] == 20  # twice 3 + 3 + 3 + 1
        assert record["counters"]["examples"] == 2 * 76
        assert [group["examples"] for group in record["last_group"]["groups"]] == [4, 4]  # 76 = 9 * 8 + 4
        assert record["normalisation"]["verdict"] != "unverified"
        assert 0 <= run["validation_iou"] <= 1
    kept = "kept for backward, one micro-batch"
    assert half["bytes"][kept] < 0.75 * full["bytes"][kept]
    assert half["bytes"]["checkpoint of the model"] == full["bytes"]["checkpoint of the model"]
    assert half["bytes"]["parameters and optimizer state"] == full["bytes"]["parameters and optimizer state"]


def test_fp32_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--precision", "fp32", "--updates", "1", "--json", str(tmp_path / "record.json")]
    assert segmentation.main(arguments) == 0
    assert "against" not in capsys.readouterr().out
    assert len(json.loads((tmp_path / "record.json").read_text())["runs"]) == 1


def test_zero_updates_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        segmentation.main(["--updates", "0"])
    assert ended.value.code == 2
    assert "--updates 0" in capsys.readouterr().err


@pytest.mark.processes
def test_control_c_shows_what_was_reached(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    run = subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), "--quick", "--updates", "100000", "--json", str(record)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout is not None
    try:
        for line in run.stdout:
            if "applied" in line:
                break
        run.send_signal(signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait(60) == 130
    finally:
        run.kill()
        run.stdout.close()
    assert "stopped by Ctrl-C after" in rest
    assert "validation IoU" in rest
    applied = [written["record"]["counters"]["applied"] for written in json.loads(record.read_text())["runs"]]
    assert applied[0] == applied[1] >= 4
