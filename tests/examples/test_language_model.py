"""The byte language model: the same updates however a batch is split, over processes and restarts too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import language_model
import sources
from language_model import SIZES, Split
from sources import BEGIN, IGNORE, collate, documents

SCRIPT = Path(language_model.__file__)
QUICK = ["--quick", "--precision", "fp32"]


def run(*arguments: str, folder: Path) -> dict[str, Any]:
    assert language_model.main([*QUICK, *arguments, "--json", str(folder / "found.json")]) == 0
    (found,) = json.loads((folder / "found.json").read_text())["runs"]
    return found  # type: ignore[no-any-return]


def test_documents_are_whole_functions_of_their_own_lengths(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(
        "class Ring:\n    def turn(self, by=1):\n        return self.place + by * self.size\n"
    )
    (tmp_path / "a.py").write_text("def long():\n    return [" + "1, " * 100 + "]\ndef short(): pass\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    turn = b"def turn(self, by=1):\n    return self.place + by * self.size\n"
    assert documents(5, 96, tmp_path) == [turn]
    found = documents(50, 96)
    assert len(set(found)) == 50
    assert all(sources.SHORTEST <= len(text) <= 96 for text in found)
    assert len({len(text) for text in found}) > 10


def test_what_fills_up_is_not_supervised() -> None:
    before, labels, indices = collate([(7, b"abc"), (9, b"defgh")])
    assert before.tolist() == [[BEGIN, 97, 98, BEGIN, BEGIN], [BEGIN, 100, 101, 102, 103]]
    assert labels.tolist() == [[97, 98, 99, IGNORE, IGNORE], [100, 101, 102, 103, 104]]
    assert indices.tolist() == [7, 9]
    torch.manual_seed(0)
    model = language_model.Transformer(16, 1, 8)
    alone = model(collate([(7, b"abc")])[0])
    torch.testing.assert_close(model(before)[:1, :3], alone, rtol=1e-5, atol=1e-6)


def test_an_update_is_the_gradient_of_the_mean_over_all_bytes_the_short_group_included() -> None:
    chosen = language_model.options([*QUICK, "--micro-batch", "4"])
    training = language_model.Training(chosen, Split(4, 8, 1), SIZES["quick"], torch.device("cpu"))
    training.sampler.set_epoch(0)
    order = list(training.sampler)
    updates = training.updates()
    for first, examples in ((0, 32), (32, 32), (64, 16)):
        rows = [training.loader.dataset[i] for i in order[first : first + examples]]
        before, labels, _ = collate(rows)
        summed = F.cross_entropy(
            training.net(before).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        count = sum(len(text) for _, text in rows)
        gradients = torch.autograd.grad(summed / count, list(training.net.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        update = next(updates)
        assert (update.examples, update.weight) == (examples, count)
        assert update.loss == pytest.approx(float(summed.detach()) / count, rel=1e-5)
        assert update.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert training.losses()[-1] == pytest.approx(update.loss, rel=1e-6)


def test_goes_on_from_a_checkpoint_under_this_split_and_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(folder=tmp_path)
    show = language_model.Progress.show

    def interrupted(progress: Any, done: int, *rest: Any) -> None:
        show(progress, done, *rest)
        if done == 4:  # one update after the checkpoint
            raise KeyboardInterrupt

    kept = tmp_path / "kept.pt"
    with monkeypatch.context() as patch:
        patch.setattr(language_model.Progress, "show", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run("--checkpoint", str(kept), folder=tmp_path)
    for m, tolerance in (("4", 0.0), ("8", 1e-5)):
        checkpoint = shutil.copy(kept, tmp_path / f"{m}.pt")
        rest = run("--micro-batch", m, "--checkpoint", str(checkpoint), folder=tmp_path)
        assert rest["losses"] == pytest.approx(whole["losses"][3:], rel=tolerance, abs=0.0)
        assert rest["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=tolerance, abs=0.0)
        assert rest["record"]["counters"]["attempted"] == 6
        assert rest["record"]["counters"]["examples"] == whole["record"]["counters"]["examples"]


def test_a_batch_that_cannot_be_split_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--micro-batch", "5"], ["--updates", "0"], ["--checkpoint", "x", "--micro-batch", "2", "4"]):
        with pytest.raises(SystemExit) as ended:
            language_model.main(arguments)
        assert ended.value.code == 2
    assert "--effective 32 is not m × A × D for m = 5 and D = 1" in capsys.readouterr().err


@pytest.mark.processes
def test_two_replicas_under_the_doctor_are_silent_and_have_the_losses_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of the README, watched: (2, 8, 2), (1, 16, 2) and (4, 4, 2) against (4, 8, 1)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    doctor = ["-m", "halfstep", "run", "--json", str(tmp_path / "doctor.json"), "--", str(SCRIPT)]
    done = subprocess.run(
        [
            *torchrun,
            *doctor,
            *QUICK,
            "--updates=4",
            "--micro-batch",
            "2",
            "1",
            "4",
            "--json",
            str(tmp_path / "runs.json"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "largest gap" in done.stdout
    single = run("--updates=4", folder=tmp_path)
    capsys.readouterr()
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [(run["m"], run["A"], run["D"]) for run in runs] == [(2, 8, 2), (1, 16, 2), (4, 4, 2)]
    for split in runs:
        assert split["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert split["bits_per_byte"] == pytest.approx(single["bits_per_byte"], rel=1e-5)
        batch = split["record"]["batch"]
        assert (batch["m"], batch["A"], batch["D"], batch["R"]) == (split["m"], split["A"], 2, 2)
        assert batch["examples_per_update"] == 32
        assert batch["supervised_elements"] == single["record"]["batch"]["supervised_elements"]
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert [f for f in found["findings"] if f["severity"] in ("error", "warning")] == []
    assert found["summary"]["judged"]["contributions"] == found["summary"]["judged"]["weighed"] > 0
