"""The family "Loss scaling and call order": its checks, one file a subject."""

from __future__ import annotations

from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling.clips import ClipAfterUpdate, ClipMidGroup, ClipScaledGradients
from halfstep.checks.scaling.collapse import LossScaleCollapse, NonfiniteUpdateApplied
from halfstep.checks.scaling.exceptions import RefusedByScaler
from halfstep.checks.scaling.life import ScalerReplaced
from halfstep.checks.scaling.optimizers import ClosureWithScaler, FusedMomentumAfterSkip, TwoStepWithScaler
from halfstep.checks.scaling.order import (
    OverflowsUnheard,
    ScaleMovesMidGroup,
    StaleUnscale,
    StepBypassesScaler,
    UnscaleMidGroup,
)
from halfstep.checks.scaling.precision import Fp16WithoutScaler, HalfParametersWithScaler, ScalerWithoutFp16
from halfstep.checks.scaling.values import ScaledGradientsInLoss, ScaledGradientsRead

SCALING: tuple[type[BaseCheck], ...] = (
    ClipScaledGradients,
    ClipAfterUpdate,
    ClipMidGroup,
    UnscaleMidGroup,
    ScaleMovesMidGroup,
    StepBypassesScaler,
    OverflowsUnheard,
    StaleUnscale,
    RefusedByScaler,
    ClosureWithScaler,
    TwoStepWithScaler,
    ScalerReplaced,
    ScalerWithoutFp16,
    HalfParametersWithScaler,
    Fp16WithoutScaler,
    ScaledGradientsRead,
    ScaledGradientsInLoss,
    FusedMomentumAfterSkip,
    NonfiniteUpdateApplied,
    LossScaleCollapse,
)
