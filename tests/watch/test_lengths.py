"""How long a schedule means to be: held against schedules whose length is known by how they were made."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from halfstep.watch.lengths import length, of_function, overrun

TOTAL = 96
WARM = 10


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)


def cosine_after_warmup(k: int) -> float:
    if k < WARM:
        return k / WARM
    return 0.5 * (1 + math.cos(math.pi * (k - WARM) / (TOTAL - WARM)))


def bound(k: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return max(0.0, 1 - k / num_training_steps) if k >= num_warmup_steps else k / num_warmup_steps


def closed(total_steps: int) -> Callable[[int], float]:
    return lambda k: helper(k) * (1 - k / total_steps)


def helper(k: int) -> float:
    return 1.0 if k else 0.5


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda k: 1 - k / TOTAL, TOTAL),
        (lambda k: max(0.0, 1 - k / TOTAL), TOTAL),
        (lambda k: min(1.0, (k + 1) / 6) * (1 - k / TOTAL), TOTAL),
        (lambda k: (1 - k / TOTAL) ** 0.9, TOTAL),
        (lambda k: 0.5 * (1 + math.cos(math.pi * k / TOTAL)), TOTAL),
        (cosine_after_warmup, TOTAL),
        (lambda k: (k + 1) / WARM if k < WARM else 1 - (k - WARM) / (TOTAL - WARM), TOTAL),  # 1 twice at the top
        (lambda k: (k + 1) / WARM if k < WARM else min(1.0, max(0.0, (TOTAL - k) / 40)), TOTAL),  # held, then down
        (functools.partial(bound, num_warmup_steps=4, num_training_steps=60), 60),
        (closed(72), 72),
        (lambda k: min(1.0, (k + 1) / WARM), None),  # a warm-up has no end to reach
        (lambda k: 0.95**k, None),
        (lambda k: 0.1 ** (k // 30), None),
        (lambda k: (k + 1) ** -0.5, None),
        (lambda k: 1.0, None),
    ],
)
def test_of_a_function(function: Callable[[int], float], expected: int | None) -> None:
    assert of_function(function) == expected


def test_a_function_that_could_do_more_than_compute_is_not_tried() -> None:
    called = []

    def noisy(k: int) -> float:
        called.append(k)
        return 1 - k / TOTAL

    state = random.getstate()
    assert of_function(noisy) is None
    assert of_function(lambda k: random.random() * (1 - k / TOTAL)) is None
    assert called == []
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("make", "calls", "beyond"),
    [
        (lambda o: schedules.CosineAnnealingLR(o, T_max=30), 30, "rises"),
        (lambda o: schedules.OneCycleLR(o, 1.0, total_steps=25), 25, "raises"),
        (lambda o: schedules.PolynomialLR(o, total_iters=12), 12, "stays"),
        (lambda o: schedules.LinearLR(o, 1.0, 0.0, total_iters=9), 9, "stays"),
        (lambda o: schedules.LinearLR(o, 0.1, total_iters=9), None, "stays"),
        (lambda o: schedules.StepLR(o, 10), None, ""),
        (lambda o: schedules.CosineAnnealingWarmRestarts(o, 10), None, ""),
        (
            lambda o: schedules.SequentialLR(
                o, [schedules.LinearLR(o, 0.1, total_iters=5), schedules.CosineAnnealingLR(o, 20)], [5]
            ),
            25,
            "rises",
        ),
        (
            lambda o: schedules.ChainedScheduler(
                [schedules.ConstantLR(o, total_iters=3), schedules.PolynomialLR(o, 14)]
            ),
            14,
            "stays",
        ),
    ],
)
def test_of_a_schedule(make: Callable[[torch.optim.Optimizer], Any], calls: int | None, beyond: str) -> None:
    schedule = make(optimizer())
    assert length(schedule) == calls
    assert overrun(schedule) == beyond
