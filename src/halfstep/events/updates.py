"""Attempts to change parameters, the loss scale, schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.events.base import Event, Outcome, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscaled(Event):
    """``in_step``: done by `scaler.step` itself, because nobody had.

    ``optimizers``: all whose gradients it divided: two optimizers may own the same parameters.
    """

    scaler: int
    optimizer: int
    scale: float | None = None
    found_inf: bool | None = None
    in_step: bool = False
    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """A verb of the scaler ("step", "unscale_", "update") raised: ``type`` and ``message`` of the exception.

    ``closure``: it was called by an optimizer's closure.
    """

    verb: str
    scaler: int
    optimizer: int | None = None
    type: str = ""
    message: str = ""
    closure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRead(Event):
    """The script asked for the scale; ``how``: its line goes on "computing" with it, "comparing" it, or neither."""

    scaler: int
    how: str = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfUpdate(Event):
    """One half of a two-step optimizer's update (SAM's `first_step`, `second_step`)."""

    optimizer: int
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyMixed(Event):
    """Gradients taken from a scaled output met values that do not carry the scale, with no division between.

    ``at``: where they were taken; ``mixed_at``, ``operator``: where they met; ``power``: of the scale they carried.
    """

    scale: float | None = None
    scaler: int | None = None
    power: float = 1.0
    operator: str = ""
    mixed_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Event):
    """One attempt of an optimizer to change its parameters.

    ``via``: "scaler" or "optimizer" (called directly). ``outcome``: what came of it. ``divided_by``: the factor a fused
    optimizer divides gradients by inside its own pass. ``gradients``: parameter tensors that held a gradient.
    ``norm``: of the gradients as the optimizer saw them, where it was measured. ``moved``: whether a parameter changed.
    ``states``: parameter tensors that already had optimizer state. ``weights``: norm of the parameters after it, where
    it was measured (the first attempts, then some); NaN or inf when it wrote such values. ``managed``: made by
    halfstep's engine.
    """

    optimizer: int
    via: str = "optimizer"
    scaler: int | None = None
    outcome: Outcome = "applied"
    closure: bool = False
    divided_by: float | None = None
    gradients: int = 0
    parameters: int = 0
    lr: float | None = None
    norm: float | None = None
    nonfinite: bool | None = None
    moved: bool | None = None
    states: int | None = None
    weights: float | None = None
    managed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpdated(Event):
    """`scaler.update()`; ``given``: a scale set by hand."""

    scaler: int
    before: float | None = None
    after: float | None = None
    given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStepped(Event):
    """``given``: the caller passed the position itself, as schedules that follow the data's progress do, or declared
    that skipped updates count."""

    scheduler: int
    optimizer: int | None = None
    position: int | None = None
    metric: bool = False
    lr_before: float | None = None
    lr_after: float | None = None
    given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersChanged(Event):
    """Parameters changed outside an optimizer's update. ``pending``: contributions then waiting in their gradients."""

    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    operator: str | None = None
