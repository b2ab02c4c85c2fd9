"""What is judged, fixed before anything runs: a number of both runs, and how far apart it may end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from halfstep.probe.runs.pair import Account
from halfstep.probe.runs.parting import Pair

_SHARE = 0.02  # of FP32's value
_GAIN = 0.02  # of what FP32 gained since its first updates
_TELLING = 5  # updates whose spread tells something
_NOISE = 2.0  # standard errors of the difference, from batch to batch


@dataclass(frozen=True, slots=True)
class Criterion:
    """What is judged, how far apart the two may be (None: the default); ``share``: as a share of FP32's value.

    ``better``: which way is better; None: "lower" for the loss; of any other number every difference counts.
    """

    metric: str = "loss"
    tolerance: float | None = None
    share: bool = False
    better: Literal["higher", "lower"] | None = None

    def way(self) -> Literal["higher", "lower"] | None:
        return self.better or ("lower" if self.metric == "loss" else None)

    def is_better(self, one: float, other: float) -> bool:
        """Whether a number is better than another, finite before anything else; where no way is known, whether it is
        merely another."""
        if not math.isfinite(one) or not math.isfinite(other):
            return math.isfinite(one)
        return one != other if self.way() is None else one < other if self.way() == "lower" else one > other

    @property
    def of_updates(self) -> bool:
        return self.metric in ("loss", "grad_norm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The criterion at the end of the updates both came to: means over the last ``window`` of them, for a logged number
    its last value. ``first``: FP32's first; ``allowed``: the tolerance in force, ``how`` it came.
    ``curve``: (as it is, FP32), update by update, of the ``optimizer``."""

    own: float
    fp32: float
    first: float
    allowed: float
    how: str
    window: int
    optimizer: int | None = None
    curve: Sequence[tuple[float, float]] = ()

    def behind(self, count: int) -> bool | None:
        """Whether the script as it is ends where FP32 stood ``count`` updates before, as far as batches tell."""
        own = [x for x, _ in self.curve[-self.window :]]
        before = [x for _, x in self.curve[: len(self.curve) - count][-self.window :]]
        if len(before) < 2 or not all(map(math.isfinite, (*own, *before))):
            return None
        noise = _NOISE * math.hypot(stdev(own), stdev(before)) / math.sqrt(self.window)
        return fmean(own) - fmean(before) <= max(self.allowed, noise)

    @property
    def apart(self) -> bool:
        if math.isfinite(self.own) and math.isfinite(self.fp32):
            return abs(self.own - self.fp32) > self.allowed
        return math.isfinite(self.own) != math.isfinite(self.fp32)


def optimizers(matched: Sequence[Pair]) -> list[int]:
    """Those that made updates, by how many: each is judged by its own curve."""
    return [ident for ident, _ in Counter(point.optimizer for point, _ in matched).most_common()]


def outcome_of(
    criterion: Criterion, own: Account, fp32: Account, matched: Sequence[Pair], optimizer: int | None = None
) -> Outcome | None:
    """The criterion at the end of what two runs have in common; None where it was not seen in both.

    ``optimizer``: whose updates are looked at (None: of that which makes most).
    """
    if not criterion.of_updates:
        ours, theirs = own.metrics.get(criterion.metric), fp32.metrics.get(criterion.metric)
        if not ours or not theirs:
            return None
        count = min(len(ours), len(theirs))
        a, b = ours[count - 1], theirs[count - 1]
        allowed, how = _given(criterion, b) or (_SHARE * abs(b), "2 % of FP32's value")
        return Outcome(a, b, theirs[0], allowed, how, 1)
    main = optimizer if optimizer is not None else next(iter(optimizers(matched)), None)
    field = "loss" if criterion.metric == "loss" else "norm"
    both = [(getattr(a, field), getattr(b, field)) for a, b in matched if a.optimizer == main]
    both = [(a, b) for a, b in both if a is not None and b is not None]
    if not both:
        return None
    window = max(1, min(50, max(len(both) // 5, min(3, len(both) // 2))))
    last, start = both[-window:], both[0][1]
    a, b = fmean(x for x, _ in last), fmean(x for _, x in last)
    finite = window >= _TELLING and all(math.isfinite(x) for pair in last for x in pair)
    given = _given(criterion, b)
    if given is not None:
        return Outcome(a, b, start, *given, window, main, both)
    gained = abs(start - b) if criterion.metric == "loss" and math.isfinite(start) else 0.0
    noise = _NOISE * stdev(x - y for x, y in last) / math.sqrt(window) if finite else 0.0
    options = [
        (_SHARE * abs(b), "2 % of FP32's value"),
        (_GAIN * gained, "2 % of what FP32 gained"),
        (noise, f"twice the standard error of the last {window} differences"),
    ]
    allowed, how = max((o for o in options if math.isfinite(o[0])), default=(0.0, "none"), key=lambda o: o[0])
    return Outcome(a, b, start, allowed, how, window, main, both)


def _given(criterion: Criterion, fp32: float) -> tuple[float, str] | None:
    if criterion.tolerance is None:
        return None
    if criterion.share:
        return criterion.tolerance * abs(fp32), f"{criterion.tolerance:.3g} of FP32's value, as given"
    return criterion.tolerance, "as given"


def number(value: float) -> str:
    return f"{value:.4g}"
