"""What each precision costs on this device: matmul, convolution and attention, forward and backward, measured."""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from halfstep.engine.precision import accelerator_type, native
from halfstep.errors import PolicyError
from halfstep.events import plain
from halfstep.probe.operations import ODD, OPERATIONS, Operation, Run, operation_of

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GAIN = 1.1  # a half precision that gains less than this is not worth its rounding for speed alone
UNEVEN = 3.0  # the usual run over the fastest: beyond this something else was measured
ENOUGH = 0.25  # seconds of one run, beyond which larger sizes tell nothing new
REPEATS = 30  # of the fastest runs; others on the machine only ever make one slower
SHORT = 0.3  # seconds that repeating one size may take, three runs apart
STEP = 12.0  # from one size to the next an operation costs about 8 times more; emulated ones rather more


@dataclass(frozen=True)
class Cell:
    """One operation in one precision."""

    operation: str
    precision: str
    seconds: dict[int, float]
    """The fastest of a few runs, by size (its index), casts included; empty where it could not be run."""
    scatter: dict[int, float] = field(default_factory=dict)
    """The median of those runs over the fastest, by size."""
    why_not: str = ""


@dataclass
class Bench:
    """What was measured so far; ``choice`` and ``advice`` follow from it."""

    device: str
    device_type: str
    threads: int
    precisions: tuple[str, ...]
    cells: list[Cell] = field(default_factory=list)
    complete: bool = False

    def cell(self, operation: str, precision: str) -> Cell | None:
        return next((c for c in self.cells if (c.operation, c.precision) == (operation, precision)), None)

    def speed(self, operation: str, precision: str, *, smallest: bool = False) -> tuple[float, int] | None:
        """(how many times faster than FP32, at which size): the largest that both have run, or the smallest."""
        one, full = self.cell(operation, precision), self.cell(operation, "fp32")
        common = sorted(one.seconds.keys() & full.seconds.keys(), reverse=not smallest) if one and full else []
        if not common or one is None or full is None:
            return None
        return full.seconds[common[0]] / one.seconds[common[0]], common[0]

    def gain(self, precision: str, *, smallest: bool = False) -> float | None:
        """Times faster than FP32, the geometric mean over the operations; None unless all of them were measured."""
        names = [operation.name for operation in OPERATIONS if operation.counted]
        speeds = [self.speed(name, precision, smallest=smallest) for name in names]
        known = [found[0] for found in speeds if found is not None]
        return statistics.geometric_mean(known) if len(known) == len(names) else None

    @property
    def scatter(self) -> float:
        """How much slower the usual run was than the fastest, at worst, where precisions are compared."""
        found = 1.0
        for cell in self.cells:
            speed = self.speed(cell.operation, cell.precision)
            full = self.cell(cell.operation, "fp32")
            if speed is not None and full is not None:
                found = max(found, cell.scatter.get(speed[1], 1.0), full.scatter.get(speed[1], 1.0))
        return found

    @property
    def choice(self) -> str | None:
        """The precision to train in on this device, for speed; None where too little was measured, or too unevenly."""
        if self.scatter > UNEVEN:
            return None
        gains = {name: self.gain(name) for name in HALVES if name in self.precisions}
        known = {name: gain for name, gain in gains.items() if gain is not None}
        if not known or self.gain("fp32") is None:
            return None
        best = max(known, key=lambda name: known[name])
        if known[best] < GAIN:
            return "fp32"
        # BF16 needs no loss scale and has FP32's range: FP16 must be clearly faster.
        return "bf16" if known.get("bf16", 0.0) * 1.15 >= known[best] else best

    @property
    def auto(self) -> str:
        """What ``MixedPrecisionManager(precision="auto")`` takes here, without measuring anything."""
        return native(self.device_type)

    def advice(self) -> list[str]:
        """Sentences: what to choose and why, what to stay away from, what "auto" does."""
        told: list[str] = []
        gains = {name: self.gain(name) for name in self.precisions}
        choice = self.choice
        if self.scatter > UNEVEN:
            told.append(
                f"timings scatter by a factor of {self.scatter:.0f}, too much to choose by: something else keeps this "
                "machine busy; run it again when it is quiet, or with fewer threads (OMP_NUM_THREADS)"
            )
            return told
        if choice is None:
            told.append("too little was measured to choose by")
        elif choice == "fp32":
            told.append(
                f"fp32: no half precision is {GAIN:g} times as fast here; it would still halve the activations' memory"
            )
        else:
            scale = ", with a loss scale" if choice == "fp16" else ", without a loss scale"
            told.append(f'{choice}: {_times(gains[choice])} fp32 on the whole{scale}: precision="{choice}"')
            told += self._shapes(choice)
        for name in HALVES:
            gain = gains.get(name)
            if gain is not None and gain < 0.5:
                told.append(f"not {name}: {1 / gain:.0f} times slower than fp32 here (emulated)")
        tf32 = gains.get("tf32")
        if tf32 is not None and tf32 >= GAIN:
            told.append(
                f'tf32: {_times(tf32)} fp32 for what stays in FP32: torch.set_float32_matmul_precision("high") for '
                "matrix products; convolutions use it unless told otherwise"
            )
        if choice is not None:
            same = "the same" if self.auto == choice else f"not {choice}: name the precision"
            if choice == "fp32" and self.auto != choice:
                same = "for the memory it saves; for speed alone name fp32"
            told.append(f'precision="auto" takes {self.auto} on this device: {same}')
        return told

    def _shapes(self, precision: str) -> list[str]:
        """What of the gain hangs on the shapes of tensors."""
        told: list[str] = []
        gain, small = self.gain(precision), self.gain(precision, smallest=True)
        if gain is not None and small is not None and small < 0.7 * gain:
            told.append(
                f"small tensors gain less: {small:.1f} times as fast at the smallest sizes, where the time goes into "
                "starting operators and casting; larger micro-batches help"
            )
        even, odd = self.cell("matmul", precision), self.cell(ODD, precision)
        common = even.seconds.keys() & odd.seconds.keys() if even and odd else set()
        if even is not None and odd is not None and common:
            size = max(common)
            more = odd.seconds[size] / even.seconds[size]
            if more > 1.25:
                sides = [operation_of(name).sizes[size][0] for name in (ODD, "matmul")]
                told.append(
                    f"keep widths multiples of 8: products of {sides[0]} cost {more:.1f} times those of {sides[1]} in "
                    f"{precision} (pad the vocabulary, too)"
                )
        return told

    def as_dict(self) -> dict[str, Any]:
        """Plain and JSON-able."""
        rows = []
        for cell in self.cells:
            speed = self.speed(cell.operation, cell.precision)
            operation = operation_of(cell.operation)
            for size, seconds in cell.seconds.items():
                rows.append(
                    {
                        "operation": cell.operation,
                        "precision": cell.precision,
                        "size": operation.shape(operation.sizes[size]),
                        "seconds": seconds,
                        "gflops": operation.flops(operation.sizes[size]) / seconds / 1e9,
                        "times_fp32": speed[0] if speed is not None and speed[1] == size else None,
                    }
                )
            if not cell.seconds:
                rows.append({"operation": cell.operation, "precision": cell.precision, "why_not": cell.why_not})
        return {
            "bench": 1,
            "device": self.device,
            "device_type": self.device_type,
            "threads": self.threads,
            "torch": torch.__version__,
            "complete": self.complete,
            "scatter": self.scatter,
            "rows": [plain(row) for row in rows],
            "gain": {name: self.gain(name) for name in self.precisions},
            "choice": self.choice,
            "auto": self.auto,
            "advice": self.advice(),
        }


def bench(
    device: torch.device | str | None = None,
    seconds: float = 40.0,
    *,
    clock: Callable[[], float] = time.perf_counter,
    operations: Sequence[Operation] | None = None,
) -> Iterator[Bench]:
    """Measure within ``seconds``; yields what is known after every cell, the same object, complete at the end.

    Larger sizes are tried while time is left, so slow precisions (emulated ones) are measured at small sizes only, and
    compared with FP32 there. The smallest size of each is always run. No random state is used; TF32 settings are put
    back.
    """
    if not seconds > 0.0:
        raise PolicyError(f"{seconds} seconds to measure in", "a positive number, such as 40")
    try:
        place = torch.device(accelerator_type() if device is None else device)
        torch.empty(1, device=place)
        if place.type == "meta":
            raise RuntimeError("tensors without values: nothing is computed there")
    except (RuntimeError, AssertionError) as error:
        raise PolicyError(f"device={str(device)!r} cannot be used ({error})", 'for example "cpu" or "cuda"') from error
    precisions = tuple(name for name in PRECISIONS if name != "tf32" or _has_tf32(place))
    found = Bench(_name_of(place), place.type, torch.get_num_threads(), precisions)
    chosen = OPERATIONS if operations is None else tuple(operations)
    end = clock() + seconds
    left = len(chosen) * len(precisions)
    for operation in chosen:
        for precision in precisions:
            budget = max(0.0, end - clock()) / left
            found.cells.append(_measure(operation, precision, place, budget, clock))
            left -= 1
            found.complete = left == 0
            yield found


def _measure(
    operation: Operation, precision: str, device: torch.device, budget: float, clock: Callable[[], float]
) -> Cell:
    end = clock() + budget
    seconds: dict[int, float] = {}
    scatter: dict[int, float] = {}
    for index, size in enumerate(operation.sizes):
        try:
            run = operation.make(size, device)
            first = _timed(run, precision, device, clock)  # makes kernels and primitives, too
            times: list[float] = []
            while len(times) < REPEATS and (len(times) < 3 or sum(times) < SHORT):
                if clock() + (times[-1] if times else first if index else 0.0) > end and (times or index):
                    break
                times.append(_timed(run, precision, device, clock))
        except (RuntimeError, NotImplementedError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            return Cell(operation.name, precision, seconds, scatter, "" if seconds else why)
        if not times:
            break
        seconds[index] = min(times)
        scatter[index] = statistics.median(times) / seconds[index]
        if seconds[index] > ENOUGH or clock() + 2 * STEP * seconds[index] > end:
            break
    return Cell(operation.name, precision, seconds, scatter)


def _timed(run: Run, precision: str, device: torch.device, clock: Callable[[], float]) -> float:
    with region(precision, device):  # one a run: autocast keeps its casts as long as its region is open
        _wait(device)
        begin = clock()
        run()
        _wait(device)
    return max(clock() - begin, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextlib.contextmanager
def region(precision: str, device: torch.device) -> Iterator[None]:
    """Compute in this precision: autocast for the halves, TF32 on or off (and as it was afterwards) on CUDA."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(_tf32(precision == "tf32"))
        dtype = HALVES.get(precision)
        if dtype is not None:
            stack.enter_context(torch.autocast(device.type, dtype=dtype))
        else:
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


@contextlib.contextmanager
def _tf32(on: bool) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    places: list[Any] = [torch.backends.cuda.matmul, cudnn.conv]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if on else "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU {_processor()}".strip()
    return device.type


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _times(gain: float | None) -> str:
    return "" if gain is None else f"{gain:.1f} times as fast as"
