"""The family "Loss scaling and call order": its checks, one file a subject."""

from __future__ import annotations

from halfstep.checks.exceptions import RefusedByScaler
from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling_clips import ClipAfterUpdate, ClipMidGroup, ClipScaledGradients
from halfstep.checks.scaling_collapse import LossScaleCollapse, NonfiniteUpdateApplied
from halfstep.checks.scaling_life import ScalerReplaced
from halfstep.checks.scaling_optimizers import ClosureWithScaler, FusedMomentumAfterSkip, TwoStepWithScaler
from halfstep.checks.scaling_order import (
    OverflowsUnheard,
    ScaleMovesMidGroup,
    StaleUnscale,
    StepBypassesScaler,
    UnscaleMidGroup,
)
from halfstep.checks.scaling_precision import Fp16WithoutScaler, HalfParametersWithScaler, ScalerWithoutFp16
from halfstep.checks.scaling_values import ScaledGradientsInLoss, ScaledGradientsRead

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
