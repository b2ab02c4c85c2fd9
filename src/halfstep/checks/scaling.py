"""The family "Loss scaling and call order"."""

from __future__ import annotations

from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling_clips import ClipAfterUpdate, ClipMidGroup, ClipScaledGradients

SCALING: tuple[type[BaseCheck], ...] = (ClipScaledGradients, ClipAfterUpdate, ClipMidGroup)
