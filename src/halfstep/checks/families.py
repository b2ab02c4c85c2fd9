"""The checks halfstep ships, family by family."""

from __future__ import annotations

from halfstep.checks.accumulation import Accumulation
from halfstep.checks.accumulation_batchnorm import BatchNormUnderAccumulation
from halfstep.checks.accumulation_denominators import Denominators
from halfstep.checks.accumulation_supervision import Supervision
from halfstep.checks.averages import Averages
from halfstep.checks.evaluation import EvaluationModeKept
from halfstep.checks.frozen import FrozenParametersMove
from halfstep.checks.halves import HalfParameters
from halfstep.checks.histories import LossHistoryKeepsGraph
from halfstep.checks.modes import MODES
from halfstep.checks.numbers import NUMBERS
from halfstep.checks.orders import EpochOrderRepeats
from halfstep.checks.ranks import CrossCheck
from halfstep.checks.registry import BaseCheck
from halfstep.checks.replicas import ACROSS, REPLICAS
from halfstep.checks.scaling import SCALING
from halfstep.checks.schedules import Schedules

CHECKS: tuple[type[BaseCheck], ...] = (
    *SCALING,
    Accumulation,
    Denominators,
    Supervision,
    BatchNormUnderAccumulation,
    Schedules,
    EpochOrderRepeats,
    Averages,
    HalfParameters,
    EvaluationModeKept,
    FrozenParametersMove,
    LossHistoryKeepsGraph,
    *MODES,
    *NUMBERS,
    *REPLICAS,
)
CROSS_CHECKS: tuple[type[CrossCheck], ...] = ACROSS
