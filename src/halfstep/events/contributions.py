"""Contributions to gradients, and what becomes of the gradients before the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.events.base import Event, Place


@dataclass(frozen=True, slots=True)
class Share:
    """What one element loss of a contribution weighs (see `halfstep.weigh.Term`, whose fields these are).

    The numbers include every factor on the loss, the loss scale too; `Contribution.scale` says which that was.
    """

    loss: str
    reduction: str
    positions: int
    supervised: int | None
    weight_sum: float | None
    divisor: float | None
    total: float
    coefficient: float
    spread: float
    ignored_share: float
    targets: int | None = None
    soft: bool = False
    parts: int = 1
    live: int | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """The whole loss divided by a number, between its reduction and the root; ``at``: where, once it was looked at.

    ``multiplied``: by the inverse, in truth. ``counts``: whether the source at ``at`` tells the number to be a group's
    micro-batches (None: the source does not show the division).
    """

    by: float
    at: Place | None = None
    multiplied: bool = False
    counts: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution(Event):
    """One backward.

    ``optimizers``: those whose parameters received gradient, with the number of parameter tensors that did.
    ``scale``: the loss scale its root carried (None: none); ``scaler``: whose.
    ``opaque``: why it could not be weighed (then ``shares`` may be partial).
    ``loss``: the root's value as passed to backward, scale included. ``dtype``: the root's. ``seeded``: the scale came
    in as the gradient of the root, whose own value does not carry it (halfstep's engine does so). ``managed``: made by
    halfstep's engine; ``undivided``: its update has still to divide the gradients by the group's weight.
    ``autocast``: half dtype of the autocast region the last forward ran in, or None; ``inside_autocast``: backward was
    itself called inside a region that is on. ``halves``: half dtype -> operators that computed in it, where the
    micro-batch was looked at (else None). ``lost``: the largest share of a gradient's elements that FP16 rounded to
    zero in one operator of backward, looked at likewise; ``lost_by``: that operator.
    ``loss_at``: where the loss was reduced to one number; ``divisions``: what the whole of it was divided by since, the
    last first. ``route``: the user's lines on the stack as one number: two calls of one helper differ in it.
    ``reached``: which parameters received gradient, as one number for each optimizer. ``device``: the root's type;
    ``thread``: the one that called backward.
    """

    number: int
    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    scale: float | None = None
    scaler: int | None = None
    shares: tuple[Share, ...] = ()
    opaque: str | None = None
    loss: float | None = None
    dtype: str = "float32"
    autocast: str | None = None
    inside_autocast: bool = False
    retain_graph: bool = False
    create_graph: bool = False
    loss_at: Place | None = None
    divisions: tuple[Division, ...] = ()
    route: int = 0
    reached: Mapping[int, int] = dataclasses.field(default_factory=dict)
    hooked: bool = False
    device: str = "cpu"
    thread: int = 0
    halves: Mapping[str, int] | None = None
    lost: float | None = None
    lost_by: str | None = None
    seeded: bool = False
    managed: bool = False
    undivided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRead(Event):
    """The value of a contribution's loss went to the script (looked at).

    ``factor``: what the value read must be multiplied by to give the root of the backward: 0.25 where it was read
    before a division by 4. ``how``: "item", or the operator that took it (a running total, a list of losses).
    ``multiplied``: the same line multiplies it.
    """

    contribution: int
    factor: float = 1.0
    how: str = "item"
    multiplied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsTaken(Event):
    """`autograd.grad`; `scale` is the loss scale its outputs carried."""

    scale: float | None = None
    scaler: int | None = None
    create_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsCleared(Event):
    """`zero_grad`, `p.grad = None` or zeroing by hand. ``had``: parameter tensors that held a gradient.

    ``nonfinite``: whether scaled gradients that no attempt had used held a non-finite value (None: not looked at).
    """

    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    how: str = "zero_grad"
    had: int = 0
    nonfinite: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsEdited(Event):
    """Gradients changed by the user's own code. ``zeroed``: they are all zero now.

    ``operator``: what did it, where it was looked at; ``factor``: the scalar it multiplied by.
    """

    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    zeroed: bool | None = None
    operator: str | None = None
    factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsRead(Event):
    """A statistic of gradients taken (a norm, a maximum). ``how``: function or operator.

    ``power``: the power of the loss scale that the value carries, where operators were looked at (a norm of scaled
    gradients 1, its square 2, one that was divided by the scale 0). ``use``: what became of it: "read" to the host,
    "compared" with a number. ``scale``, ``scaler``: which scale it carries.
    """

    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    how: str = ""
    value: float | None = None
    power: float | None = None
    use: str | None = None
    scale: float | None = None
    scaler: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(Event):
    """``kind``: "norm" or "value"; ``limit`` as passed; ``norm``: the total norm found, before clipping.

    ``by_hand``: the script measured the norm and multiplied the gradients itself. ``nonfinite``: so many of the
    ``tensors`` given were not finite before, counted where the norm was not.
    """

    kind: str
    limit: float
    norm: float | None = None
    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    norm_type: float = 2.0
    by_hand: bool = False
    nonfinite: int | None = None
    tensors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfSums(Event):
    """So many contributions were added up in half-precision gradients that no optimizer owns."""

    dtype: str
    parameters: int
    contributions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics(Event):
    """A group's batch normalisation compared with that of the group as one batch; ``at``: where the layer was made.

    ``contributions``: their numbers; ``samples`` of each. ``difference``: of the gradient of a layer's input, for the
    same inputs and the same gradients from above, relative; the largest over ``layers``.
    """

    optimizer: int
    layers: int = 1
    contributions: tuple[int, ...] = ()
    samples: int = 0
    difference: float | None = None
