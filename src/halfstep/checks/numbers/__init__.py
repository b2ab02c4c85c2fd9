"""The family "Numbers": its checks, one file a subject."""

from __future__ import annotations

from halfstep.checks.numbers.culprits import Culprits
from halfstep.checks.numbers.rounding import GradientUnderflow, OptimizerEpsilon, Positions, Totals
from halfstep.checks.numbers.spread import ClipSpreads, PoisonedStatistics
from halfstep.checks.numbers.unsupported import Unsupported
from halfstep.checks.registry import BaseCheck

NUMBERS: tuple[type[BaseCheck], ...] = (
    Culprits,
    Positions,
    Totals,
    GradientUnderflow,
    OptimizerEpsilon,
    PoisonedStatistics,
    ClipSpreads,
    Unsupported,
)
