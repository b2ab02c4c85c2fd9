"""Parameters, their averages, the orders data come in, graphs that are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.events.base import Event, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageUpdated(Event):
    """An average of an optimizer's parameters moved towards them: an EMA, a target network.

    ``average``: its number in the run; ``optimizers``: whose parameters it follows, with how many of them;
    ``decay``: the share of its old value that it kept; ``still``: of the elements that differed from their parameter,
    the share that did not move all the same (looked at where the average is in half precision); ``made_at``: where the
    average became half.
    """

    average: int
    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    how: str = ""
    decay: float | None = None
    dtype: str = "float32"
    still: float | None = None
    made_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersSampled(Event):
    """Half-precision parameters compared with what they were ``updates`` attempts before.

    ``elements`` were compared; of those that had a gradient (``driven``), ``still`` have the very value they had.
    ``at``: where the parameters became half, else where the optimizer was made.
    """

    optimizer: int
    dtype: str
    updates: int
    elements: int
    driven: int
    still: int
    rounding: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentSampled(Event):
    """A half-precision second moment beside the same average kept in FP32 over ``updates`` attempts.

    ``ratio``: the median of stored / FP32 over the elements looked at; ``unchanged``: the share of them that the last
    attempt left as they were although their squared gradient lay below them.
    """

    optimizer: int
    key: str
    dtype: str
    beta: float
    updates: int
    ratio: float | None = None
    unchanged: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMoved(Event):
    """Parameters meant frozen that an optimizer moved. ``why`` they are meant frozen: "requires_grad is False",
    "gradient zeroed by hand", "no contribution". ``change``: the largest change of an element so far."""

    optimizer: int
    parameters: int
    why: str
    name: str | None = None
    updates: int = 1
    change: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPassed(Event):
    """One pass of a loader (or of a hand-drawn permutation) through its data; ``at``: the line that iterates.

    ``source``: number of the data; ``began``: contributions before the pass; ``repeats``: batches from the first on
    that held the very indices of the pass before it; ``shuffles``: whether its sampler means to shuffle.
    """

    source: int
    sampler: str
    shuffles: bool
    began: int
    batches: int
    indices: int
    repeats: int = 0
    whole: bool = True
    sampler_epoch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsKept(Event):
    """Graphs of earlier contributions that something keeps alive.

    ``graphs`` of the last ``asked`` contributions; ``tensors``: living tensors that carry a graph; ``growth`` of that
    number an update; ``holder``: the variable that keeps them, where it was found (``at``: where it grows).
    """

    graphs: int
    asked: int
    tensors: int | None = None
    growth: float | None = None
    holder: str | None = None
