"""The user's own metrics: whatever a number comes in, the record stays JSON; the rest is refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfstep import HalfstepError, MisuseError, MixedPrecisionManager, PolicyError


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (1, 1),
        ("first", "first"),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[0.5]]), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([3]), 3.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (float("inf"), "inf"),
        ([np.float32(0.5), torch.tensor(2.0)], [0.5, 2.0]),
        ({"cat": torch.tensor(0.5), 3: (1, 2)}, {"cat": 0.5, "3": [1, 2]}),
    ],
    ids=str,
)
def test_numbers_in_any_clothes(given: Any, kept: Any) -> None:
    rows: list[dict[str, Any]] = []
    manager = MixedPrecisionManager(False, record=rows.append)
    manager.log(iou=given)
    (metric,) = json.loads(json.dumps(manager.report(), allow_nan=False))["metrics"]
    assert metric == {"applied_updates": 0, "iou": kept}
    assert type(rows[0]["iou"]) is type(given if kept == "inf" else kept)


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(3),
        torch.tensor(1j),
        np.ones(2),
        1j,
        nn.Linear(1, 1),
        object(),
        [torch.ones(2)],
        {"a": {1, 2}},
        np.array([None]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_record_cannot_hold(given: Any) -> None:
    manager = MixedPrecisionManager(False)
    with pytest.raises(PolicyError, match=r"manager\.log was given iou"):
        manager.log(loss=1.0, iou=given)
    assert manager.report()["metrics"] == []


def test_metrics_have_names() -> None:
    manager = MixedPrecisionManager(False)
    with pytest.raises(MisuseError, match=r"manager\.log was given a value without a name"):
        manager.log(3)
    with pytest.raises(MisuseError) as caught:
        manager.log({"iou": 0.5})
    assert "manager.log(**metrics)" in caught.value.fix
    for name in ("applied_updates", "kind"):
        with pytest.raises(HalfstepError, match=f"{name}="):
            manager.log(**{name: 3})


def test_metrics_wait_for_nothing(late: bool) -> None:
    """On an accelerator a metric is read at the next update, against the updates that were applied before it."""
    rows: list[dict[str, Any]] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    manager = MixedPrecisionManager(precision="fp16", device="cpu", record=rows.append)

    def update(factor: float) -> None:
        manager.backward(model(torch.ones(1, 2)).sum() * factor)
        manager.step(model, optimizer)

    update(1e38)
    update(1.0)
    value = torch.tensor(0.5)
    manager.log(iou=value)
    value.fill_(7.0)  # what it was when it was logged
    assert [row["kind"] for row in rows].count("metrics") == (not late)
    update(1.0)
    expected = {"applied_updates": 1, "iou": 0.5}
    assert [row for row in rows if row["kind"] == "metrics"] == [{"kind": "metrics", **expected}]
    manager.log(iou=0.75)
    assert manager.report()["metrics"] == [expected, {"applied_updates": 2, "iou": 0.75}]
