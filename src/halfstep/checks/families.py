"""The checks halfstep ships, family by family."""

from __future__ import annotations

from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling import ClipScaledGradients
from halfstep.checks.schedules import Schedules

CHECKS: tuple[type[BaseCheck], ...] = (ClipScaledGradients, Schedules)
