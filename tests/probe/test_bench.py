"""The bench under a clock of our own: what it tries, where it stops, what it advises; the real operations run once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep import PolicyError
from halfstep.cli import main
from halfstep.engine.precision import native
from halfstep.probe import bench as module
from halfstep.probe.bench import Bench, bench, region
from halfstep.probe.operations import ODD, OPERATIONS, Operation


class Clock:
    """Time passes only in runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[tuple[str, str, int]] = []

    def __call__(self) -> float:
        return self.now


def operations(clock: Clock, cost: Callable[[str, str], float], *, broken: str = "") -> list[Operation]:
    """The operations, eight times dearer with each size; ``cost(operation, precision)`` of the smallest."""

    def made(operation: Operation) -> Operation:
        def make(size: Any, device: torch.device) -> Callable[[], None]:
            index = operation.sizes.index(size)

            def run() -> None:
                half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
                precision = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[half]
                if precision == broken:
                    raise NotImplementedError("not implemented for 'Half'")
                clock.now += cost(operation.name, precision) * 8.0**index
                clock.ran.append((operation.name, precision, index))

            return run

        return dataclasses.replace(operation, make=make)

    return [made(operation) for operation in OPERATIONS]


def measured(cost: Callable[[str, str], float], seconds: float = 40.0, **given: Any) -> tuple[Bench, Clock]:
    clock = Clock()
    *_, found = bench("cpu", seconds, clock=clock, operations=operations(clock, cost, **given))
    return found, clock


def test_emulated_fp16_is_cut_short_and_compared_where_both_ran() -> None:
    slow = {"fp32": 1e-3, "bf16": 0.5e-3, "fp16": 30e-3}
    found, clock = measured(lambda _, precision: slow[precision])
    assert clock.now < 60
    assert found.complete
    for operation in OPERATIONS:
        speed, size = found.speed(operation.name, "fp16") or (0.0, -1)
        assert speed == pytest.approx(1 / 30)
        full = found.cell(operation.name, "fp32")
        assert full is not None
        assert size < max(full.seconds)
        assert found.speed(operation.name, "bf16") == (pytest.approx(2.0), max(full.seconds))
    assert found.choice == "bf16"
    advice = "\n".join(found.advice())
    assert "not fp16: 30 times slower" in advice
    assert 'precision="auto" takes bf16 on this device: the same' in advice


def test_the_smallest_size_is_always_run_and_the_budget_bounds_the_rest() -> None:
    found, clock = measured(lambda *_: 1.0, seconds=1.0)
    assert {index for _, _, index in clock.ran} == {0}
    assert all(cell.seconds.keys() == {0} for cell in found.cells)
    assert len(clock.ran) == 2 * 12  # once to warm up, once to measure
    for seconds in (5.0, 40.0):
        _, clock = measured(lambda *_: 1e-5, seconds=seconds)
        assert clock.now <= seconds


@pytest.mark.parametrize(
    ("bf16", "fp16", "choice"),
    [(2.0, 0.03, "bf16"), (1.0, 1.05, "fp32"), (0.1, 3.0, "fp16"), (2.0, 2.1, "bf16"), (2.0, 4.0, "fp16")],
)
def test_the_choice_is_the_fastest_but_bf16_where_they_are_near(bf16: float, fp16: float, choice: str) -> None:
    speeds = {"fp32": 1.0, "bf16": bf16, "fp16": fp16}
    found, _ = measured(lambda _, precision: 1e-3 / speeds[precision])
    assert found.choice == choice
    assert found.advice()[0].startswith(f"{choice}:")
    assert found.gain("bf16") == pytest.approx(bf16)


def test_shapes_that_gain_less_are_told() -> None:
    def cost(operation: str, precision: str) -> float:
        return 1e-4 * (3.0 if precision == "bf16" and operation == ODD else 1.0) / (2.0 if precision == "bf16" else 1.0)

    found, _ = measured(cost)
    assert found.gain("bf16") == pytest.approx(2.0)  # the odd products are no part of it
    assert "products of 2047 cost 3.0 times those of 2048 in bf16" in "\n".join(found.advice())
    clock = Clock()
    flat = operations(clock, cost)

    def slow_at_first(operation: Operation) -> Operation:
        def make(size: Any, device: torch.device) -> Callable[[], None]:
            run = operation.make(size, device)

            def slower() -> None:
                run()
                clock.now += 1e-3 if size == operation.sizes[0] and torch.is_autocast_enabled("cpu") else 0.0

            return slower

        return dataclasses.replace(operation, make=make)

    *_, found = bench("cpu", 40.0, clock=clock, operations=[slow_at_first(operation) for operation in flat])
    assert "small tensors gain less: 0.1 times" in "\n".join(found.advice())


def test_a_busy_machine_is_no_reason_to_choose() -> None:
    calls = iter(range(1_000_000))
    found, _ = measured(lambda _, precision: 1e-4 * (10.0 if next(calls) % 3 else 1.0))
    assert found.scatter == pytest.approx(10.0)
    assert found.choice is None
    assert "timings scatter by a factor of 10" in found.advice()[0]


def test_what_cannot_be_run_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = measured(lambda *_: 1e-3, broken="fp16")
    assert found.gain("fp16") is None
    assert found.choice == "fp32"
    row = next(row for row in found.as_dict()["rows"] if row["precision"] == "fp16")
    assert row["why_not"] == "not implemented for 'Half'"
    with pytest.raises(PolicyError, match="nowhere"):
        next(bench("nowhere"))
    assert main(["bench", "--device", "meta"]) == 2
    assert "nothing is computed there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--seconds", "0"])
    assert "positive" in capsys.readouterr().err


def test_interrupted_it_shows_what_was_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()

    def interrupted(operation: str, precision: str) -> float:
        if (operation, precision) == ("convolution", "fp16"):
            raise KeyboardInterrupt
        return 1e-3

    real, made = module.bench, operations(clock, interrupted)
    monkeypatch.setattr(module, "bench", lambda device, seconds: real(device, seconds, clock=clock, operations=made))
    assert main(["bench", "--device", "cpu"]) == 130
    out = capsys.readouterr().out
    assert "matmul" in out
    assert "attention" not in out
    assert "interrupted" in out
    assert "too little was measured" in out


def test_the_real_operations_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = torch.get_rng_state()
    assert main(["bench", "--device", "cpu", "--seconds", "1", "--json", str(tmp_path / "bench.json")]) == 0
    assert torch.equal(torch.get_rng_state(), random)
    out = capsys.readouterr().out
    for words in ("matmul", "convolution", "attention", "fp32", "bf16", "fp16", "→"):
        assert words in out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["complete"]
    assert found["auto"] == native("cpu")
    assert {row["operation"] for row in found["rows"]} == {"matmul", ODD, "convolution", "attention"}
    assert all(row["seconds"] > 0 for row in found["rows"] if "seconds" in row)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_operations_compute_in_the_precision_that_is_named(operation: Operation) -> None:
    """By the products each runs, seen on their way: the dtype their operators give."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = str(func)
            first = out[0] if isinstance(out, (tuple, list)) else out
            if any(part in name for part in ("mm", "convolution", "attention")) and isinstance(first, torch.Tensor):
                seen.append(first.dtype)
            return out

    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        seen: list[torch.dtype] = []
        run = operation.make(operation.sizes[0], torch.device("cpu"))
        with region(precision, torch.device("cpu")), Products():
            run()
        assert len(seen) >= 3 if "matmul" in operation.name else len(seen) >= 2
        assert set(seen) == {dtype}
