"""The checks halfstep ships, family by family."""

from __future__ import annotations

from halfstep.checks.accumulation.batchnorm import BatchNormUnderAccumulation
from halfstep.checks.accumulation.calls import Accumulation
from halfstep.checks.accumulation.denominators import Denominators
from halfstep.checks.accumulation.supervision import Supervision
from halfstep.checks.modes.regions import MODES
from halfstep.checks.numbers import NUMBERS
from halfstep.checks.registry import BaseCheck
from halfstep.checks.replicas.ranks import CrossCheck
from halfstep.checks.replicas.reductions import ACROSS, REPLICAS
from halfstep.checks.scaling import SCALING
from halfstep.checks.schedules.advance import Schedules
from halfstep.checks.schedules.averages import Averages
from halfstep.checks.schedules.evaluation import EvaluationModeKept
from halfstep.checks.schedules.frozen import FrozenParametersMove
from halfstep.checks.schedules.halves import HalfParameters
from halfstep.checks.schedules.histories import LossHistoryKeepsGraph
from halfstep.checks.schedules.orders import EpochOrderRepeats

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
