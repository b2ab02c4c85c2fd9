"""The page of an engine's run: drawn from the plain record, every line of it there, plain where not a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from halfstep import MixedPrecisionManager
from halfstep.report.run_page import bars, show_run


def drawn(record: dict[str, Any]) -> str:
    out = io.StringIO()
    show_run(record, Console(file=out, width=200, no_color=True))
    return out.getvalue()


def test_a_run_on_one_page() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = MixedPrecisionManager(precision="fp16", init_scale=2.0**40)
    manager.keep_fp32(model, "1")
    data = [(torch.randn(2, 4), torch.randint(0, 3, (2,))) for _ in range(5)]
    for _ in range(10):
        for group in manager.groups(data, 2, weight=lambda b: len(b[1])):
            for x, y in group:
                with manager.context():
                    out = model(x)
                manager.backward(F.cross_entropy(out.float(), y))
            manager.step(model, optimizer)
    manager.preflight(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]), data[:2])
    manager.accept("as good as FP32")
    text = drawn(manager.report())
    for part in (
        "accepted: as good as FP32",
        "preflight   passed after",
        "30 attempted",
        "m = 2, A = 2, D = 1: 4 examples an update",
        "100 elements, counted ahead; verified",
        "kept, with its own denominator: 1 of 2 micro-batches, 2 examples",
        "fp16 on cpu; kept in FP32: 1",
        "2^40 (first at 0)",
        "clipped to 2; measured p10",
        "MiB peak (measured",
        "loss",
        "skipped",
        "addmm",
        "torch seed 0",
    ):
        assert part in text, part


def test_half_precision_that_was_declared_and_never_ran_is_on_the_page() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = MixedPrecisionManager(precision="bf16")
    assert "never entered" not in drawn(manager.report())
    manager.backward(model(torch.ones(2, 4)).sum())
    manager.step(model, optimizer)
    assert "fp32 (bf16 declared; manager.context() was never entered) on cpu" in drawn(manager.report())


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 7, 2, 5, 6, 3), "m = ragged, A = 2, D = 1: ragged, 7 to 11 examples an update"),
        ((4, 4, 4, 4, 4, 4), "m = 4, A = 2, D = 1: 8 examples an update"),
        ((4, 4, 4, 4, 4, 1), "m = 4, A = 2, D = 1: 8 examples an update (5 to 8)"),
    ],
)
def test_examples_an_update(sizes: tuple[int, ...], words: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters())
    manager = MixedPrecisionManager(False)
    for group in manager.groups([torch.ones(size, 4) for size in sizes], 2, weight=len):
        for x in group:
            manager.backward(model(x).mean())
        manager.step(model, optimizer)
    record = manager.report()
    text = drawn(record)
    assert words in text
    totals = [sum(sizes[at : at + 2]) for at in (0, 2, 4)]
    assert ("examples an update (" in text) == ("(" in words)
    assert record["batch"]["examples_range"] == [min(totals), max(totals)]
    assert record["batch"]["examples_per_update"] == (None if totals == [11, 7, 9] else 8)


def test_before_anything_ran_it_says_so() -> None:
    text = drawn(MixedPrecisionManager(False).report())
    for part in ("prepared", "0 attempted: none", "no group yet", "not observed", "not measured yet", "none was short"):
        assert part in text, part


def test_bars_follow_the_values() -> None:
    assert bars([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert bars([1.0, 1.0]) == "▁▁"
    assert len(bars([float(i) for i in range(1000)])) == 60
    assert bars([1.0, 10.0, 100.0, 1000.0], logarithmic=True)[1] == "▃"
