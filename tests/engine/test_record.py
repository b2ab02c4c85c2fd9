"""The record of a run: plain, strict JSON, with what was measured and what was not."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import MixedPrecisionManager, PolicyError, RecordError


def train(precision: str = "fp16", epochs: int = 3, **policy: Any) -> MixedPrecisionManager:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    manager = MixedPrecisionManager(precision=precision, **policy)
    data = [(torch.randn(2, 4), torch.randint(0, 3, (2,))) for _ in range(5)]
    first = {id(batch): 2 * number for number, batch in enumerate(data)}

    def ids(batch: Any) -> list[int]:
        return [first[id(batch)], first[id(batch)] + 1]

    for _ in range(epochs):
        for group in manager.groups(data, 2, weight=lambda b: len(b[1]), ids=ids):
            for x, y in group:
                with manager.context():
                    out = model(x)
                manager.backward(F.cross_entropy(out.float(), y))
            manager.step(model, optimizer)
    return manager


def test_prepared_tried_accepted() -> None:
    manager = MixedPrecisionManager(precision="bf16")
    record = manager.report()
    assert record["status"] == "prepared"
    assert record["batch"]["A"] is None
    assert record["operators"]["observed"].startswith("not observed")
    assert record["precision"]["master_weights"].startswith("not observed")
    manager = train("bf16")
    assert manager.report()["status"] == "tried"
    for reason in ("", None):
        with pytest.raises(PolicyError, match="in words"):
            manager.accept(reason)  # type: ignore[arg-type]
    manager.accept("same IoU as FP32 over three seeds")
    record = manager.report()
    assert record["status"] == "accepted"
    assert record["accepted"] == {"reason": "same IoU as FP32 over three seeds", "applied_updates": 9}


def test_the_record_is_strict_json_with_all_it_should_hold() -> None:
    manager = train(init_scale=2.0**40, min_scale=2.0**-126)
    record = json.loads(json.dumps(manager.report(), allow_nan=False))
    counters = record["counters"]
    assert counters["attempted"] == 9
    assert counters["applied"] + counters["skipped"] == 9
    assert counters["skipped"] > 0
    assert counters["micro_batches"] == 15
    assert (counters["examples"], counters["weight"]) == (30, 30)
    batch = record["batch"]
    assert (batch["m"], batch["A"], batch["D"], batch["R"], batch["examples_per_update"]) == (2, 2, 1, 1, 4)
    assert "computed" in batch["how"]
    assert batch["group_sizes"] == {"1": 3, "2": 6}
    assert record["last_group"]["kept"] == 3
    assert len(record["last_group"]["groups"][-1]["ids"]) == 2
    assert record["loss_scale"]["path"][0] == {"update": 0, "scale": 2.0**40, "why": "first"}
    assert record["loss_scale"]["now"] == 2.0 ** (40 - counters["skipped"])
    operators = record["operators"]["dtypes"]
    assert operators["addmm"] == {"float16": 2}
    assert operators["log_softmax"] == {"float32": 1}
    assert record["memory"]["cpu"]["peak_bytes"] > 50_000_000
    assert "measured" in record["memory"]["cpu"]["how"]
    assert record["wall_seconds"]["value"] > 0
    assert record["versions"]["torch"] == torch.__version__
    assert record["seeds"]["torch"] == 7
    assert record["policy"]["loss_scale"]["growth_interval"] == 2000
    assert [u["attempted_updates"] for u in record["updates"]] == list(range(1, 10))
    assert {u["grad_norm"] for u in record["updates"] if u["outcome"] == "skipped"} <= {"inf", "nan"}
    assert record["position"] == {"epoch": 3, "micro_batches": 0}


def test_the_journal_follows_into_a_directory(tmp_path: Path) -> None:
    manager = train("bf16", record=tmp_path / "run")
    manager.log(iou=0.75)
    rows = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["update"] * 9 + ["metrics"]
    assert rows[-1] == {"kind": "metrics", "applied_updates": 9, "iou": 0.75}
    assert rows[0]["grad_norm"] == manager.report()["updates"][0]["grad_norm"]
    seen: list[dict[str, Any]] = []
    train("bf16", record=seen.append)
    assert len(seen) == 9


def test_a_journal_that_cannot_be_written_any_more_ends_and_the_run_goes_on(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "journal.jsonl").symlink_to(full)
    with pytest.warns(UserWarning, match="ends here: .*No space left") as told:
        manager = train("bf16", record=tmp_path)
    assert len([warning for warning in told if "ends here" in str(warning.message)]) == 1
    assert manager.report()["counters"]["applied"] == 9
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot write a journal"):
        MixedPrecisionManager(record=tmp_path / "file")


def test_per_layer_norms_are_thinned() -> None:
    """Ten thousand updates leave at most two thousand columns of layer norms, evenly spread, and 2000 rows."""
    from halfstep.engine.journal import COLUMNS, FIELDS, Journal

    journal = Journal()
    names = ["a", "b"]
    for number in range(1, 10_001):
        row = (number, number, "applied", 1.0, 1.0, 5.0, 1.0, None, 1, None, 0.1)
        journal.update(row, names, torch.tensor([3.0, 4.0]), 2.0)
    assert len(FIELDS) == len(row)
    columns = journal.layer_norms()
    assert COLUMNS / 2 <= len(columns) <= COLUMNS
    strides = {b[0] - a[0] for a, b in pairwise(columns)}
    assert strides == {8}
    assert columns[0][1] == {"a": 1.5, "b": 2.0}
    rows = journal.thinned()
    assert len(rows) == 2000
    assert rows[-1][0] == 10_000


def test_repr_prints_the_whole_policy() -> None:
    text = repr(MixedPrecisionManager(precision="fp16", max_norm=None))
    for part in ("precision=fp16", "max_norm=None", "applied", "skip", "scale 65536", "growth_interval 2000", "D 1"):
        assert part in text
    assert "not activated" in repr(MixedPrecisionManager(False))
    assert "auto (bf16 on cpu" in repr(MixedPrecisionManager(device="cpu"))


def test_public_names_are_sorted_and_there() -> None:
    assert halfstep.__all__ == sorted(halfstep.__all__)
    for name in ("MixedPrecisionManager", "Update", "tokens", "HalfstepError", "ForeignGradients", "watch"):
        assert name in dir(halfstep)
        assert getattr(halfstep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = halfstep.nothing  # type: ignore[attr-defined]
