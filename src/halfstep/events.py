"""The language all speak: what a run did (events) and what is wrong with it (findings).

Events are frozen, plain and versioned: numbers, strings and tuples of them, no tensors, so that a record can be
judged and drawn anywhere. The watch and the engine write them, ``record`` keeps them, ``checks`` judge them.
A value that was not known when the event happened (it was still on the device) is read late, before the event is
released; ``None`` always means "not observed", never zero.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1

Severity = Literal["error", "warning", "info"]
Outcome = Literal["applied", "skipped", "empty"]


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's: file, line and function; in a notebook the file is the cell's name."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What every event carries: its number in the run, the user's line, the contributions begun so far."""

    seq: int = 0
    at: Place | None = None
    micro: int = 0


# -- the run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    argv: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    pid: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Event):
    """The exception that ended the script; `frames` innermost last, the user's own only. ``in_backward``: torch's
    autograd engine was running."""

    type: str
    message: str
    frames: tuple[Place, ...] = ()
    in_backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    code: int | str | None = 0
    by: str = "script"
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Event):
    """A failure inside halfstep itself; the run goes on, what this hook would have seen is missing."""

    where: str
    message: str


# -- things made, loaded, saved ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerMade(Event):
    scaler: int
    scale: float
    enabled: bool = True
    device: str = ""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMade(Event):
    """`dtypes`: parameter dtype -> number of parameter tensors; `options`: the first group's plain settings."""

    optimizer: int
    type: str
    parameters: int
    elements: int
    dtypes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfParameters(Event):
    """An optimizer about to update parameters that are themselves in half precision; ``at``: where they became so.

    ``dtypes``: half dtype -> number of its parameter tensors that hold a gradient; ``name``: the first one's.
    """

    optimizer: int
    dtypes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    name: str | None = None
    used_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerMade(Event):
    """`length`: the calls after which the schedule has run its course, where it has such a number.

    ``overrun``: what further calls do: the rate "rises" again, "stays" at its end, or the call "raises".
    """

    scheduler: int
    optimizer: int | None
    type: str
    length: int | None = None
    per_metric: bool = False
    overrun: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded(Event):
    """`load_state_dict` of a module, optimizer, scaler or scheduler, or a file read ("file with optimizer").

    ``states``: parameter tensors for which an optimizer holds state after it. ``numbers``: plain floats in the file.
    """

    kind: str
    ident: int | None = None
    states: int | None = None
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved(Event):
    """`torch.save`; `has` names what was found in it ("module", "optimizer", "scaler", "scheduler")."""

    has: tuple[str, ...] = ()


# -- contributions -----------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Division:
    """The whole loss divided by a number, between its reduction and the root; ``at``: where, once it was looked at.

    ``multiplied``: by the inverse, in truth.
    """

    by: float
    at: Place | None = None
    multiplied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution(Event):
    """One backward.

    ``optimizers``: those whose parameters received gradient, with the number of parameter tensors that did.
    ``scale``: the loss scale its root carried (None: none); ``scaler``: whose.
    ``opaque``: why it could not be weighed (then ``shares`` may be partial).
    ``loss``: the root's value as passed to backward, scale included. ``dtype``: the root's.
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


# -- updates -----------------------------------------------------------------------------------------------------


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
class NonFinite(Event):
    """The operator that made the non-finite value which reached the loss or a gradient, its own inputs being finite.

    ``phase``: "forward" or "backward"; in backward ``at`` and ``module`` are those of the forward operator, ``node`` is
    the gradient operator. ``value``: "nan" or "inf"; ``dtype`` of the output and ``limit``, the largest number it has;
    ``peak``: the largest magnitude among the inputs; ``exact``: among the outputs of the same operator in FP32, where
    it was computed again. ``reached``: "loss", "gradient", or "output" where a later operator (``absorbed``) hid the
    value and made ``share`` of its own output wrong. ``scale``: the loss scale that the backward carried.

    ``cause``: "operator"; "input" or "parameter" (not finite before the first operator: ``count`` of ``of`` elements);
    "masked" (``count`` of ``of`` rows of a softmax have nothing left); "constant" (the script's number ``constant`` is
    beyond the limit); "epsilon" (``constant`` rounded to zero); "probability" (a half-precision probability was exactly
    0 or 1); "reduction"; "nothing" (an empty sum divided by its own count). ``hint``: more of it in words.
    ``in_optimizer``: it was made inside an optimizer's update.
    """

    operator: str
    phase: str = "forward"
    node: str | None = None
    value: str = "nan"
    dtype: str = ""
    peak: float | None = None
    limit: float | None = None
    exact: float | None = None
    module: str | None = None
    reached: str = "loss"
    scale: float | None = None
    cause: str = "operator"
    constant: float | None = None
    count: int | None = None
    of: int | None = None
    hint: str | None = None
    absorbed: str | None = None
    share: float | None = None
    in_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbabilitiesSaturated(Event):
    """A loss on half-precision probabilities that were rounded to 0 or 1 although the target says otherwise.

    ``count`` of ``of`` elements, made by ``operator`` (a sigmoid, a softmax) at ``made_at``.
    """

    dtype: str
    count: int
    of: int
    operator: str = ""
    made_at: Place | None = None
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsPoisoned(Event):
    """Running statistics of ``module`` became non-finite in a forward in training mode; ``at``: the root's call.

    ``buffers``: their names. ``weights``: whether the parameters of the root were all finite when it was seen.
    """

    module: str
    buffers: tuple[str, ...] = ()
    weights: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsCollided(Event):
    """Integers in sequence that were equal after rounding to ``dtype``: ``distinct`` of ``count``, up to ``largest``.

    ``first``: the smallest two neighbours that became one. ``operator``: what rounded them ("_to_copy", "arange").
    """

    dtype: str
    count: int
    distinct: int
    largest: float
    first: tuple[float, float] | None = None
    operator: str = ""
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalStalled(Event):
    """A running total in ``dtype`` that did not grow by what was added: it stays at ``total``, ``added`` was lost.

    ``times``: so many additions in a row at this line changed nothing, of ``additions`` seen.
    """

    dtype: str
    total: float
    added: float
    times: int = 1
    additions: int = 1
    elements: int = 1


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """The gradient of one layer in one contribution, against FP32, every number with the loss scale in it.

    Of ``elements``, FP32 keeps ``kept`` (non-zero); ``lost`` of these are zero in half precision, ``subnormal`` have
    lost bits there. ``peak``: the largest magnitude. ``missing``: the norm of what rounding changed, by FP32's norm.
    ``exponents``: floor(log2 of the magnitude) -> number of elements.
    """

    name: str
    elements: int
    kept: int
    lost: int
    subnormal: int = 0
    peak: float | None = None
    missing: float | None = None
    exponents: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsMeasured(Event):
    """A backward in FP16 beside the same backward in FP32: what each parameter's gradient lost to rounding.

    ``layers``: of parameters; ``activations``: of the gradients that were half, by module. ``worst_at``, ``worst_by``:
    the forward line and the gradient operator that lost most. ``fitting``: the power of two that the scale could be.
    """

    scale: float | None = None
    dtype: str = "float16"
    layers: tuple[LayerGradient, ...] = ()
    activations: tuple[LayerGradient, ...] = ()
    worst_by: str | None = None
    worst_at: Place | None = None
    worst_module: str | None = None
    fitting: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Event):
    """One attempt of an optimizer to change its parameters.

    ``via``: "scaler" or "optimizer" (called directly). ``outcome``: what came of it. ``divided_by``: the factor a fused
    optimizer divides gradients by inside its own pass. ``gradients``: parameter tensors that held a gradient.
    ``norm``: of the gradients as the optimizer saw them, where it was measured. ``moved``: whether a parameter changed.
    ``states``: parameter tensors that already had optimizer state. ``weights``: norm of the parameters after it, where
    it was measured (the first attempts, then some); NaN or inf when it wrote such values.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpdated(Event):
    """`scaler.update()`; ``given``: a scale set by hand."""

    scaler: int
    before: float | None = None
    after: float | None = None
    given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStepped(Event):
    """``given``: the caller passed the position itself, as schedules that follow the data's progress do."""

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


# -- weights, averages, orders -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageUpdated(Event):
    """An average of an optimizer's parameters moved towards them: an EMA, a target network.

    ``average``: its number in the run; ``optimizers``: whose parameters it follows, with how many of them;
    ``decay``: the share of its old value that it kept; ``still``: of the elements that differed from their parameter,
    the share that did not move all the same (looked at where the average is in half precision); ``made_at``: where the
    average became half.
    """

    average: int
    optimizers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    how: str = ""
    decay: float | None = None
    dtype: str = "float32"
    still: float | None = None
    made_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersSampled(Event):
    """Half-precision parameters compared with what they were ``updates`` attempts before.

    ``elements`` were compared; of those that had a gradient (``driven``), ``still`` have the very value they had.
    ``at``: where the parameters became half, else where the optimizer was made.
    """

    optimizer: int
    dtype: str
    updates: int
    elements: int
    driven: int
    still: int
    rounding: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentSampled(Event):
    """A half-precision second moment beside the same average kept in FP32 over ``updates`` attempts.

    ``ratio``: the median of stored / FP32 over the elements looked at; ``unchanged``: the share of them that the last
    attempt left as they were although their squared gradient lay below them.
    """

    optimizer: int
    key: str
    dtype: str
    beta: float
    updates: int
    ratio: float | None = None
    unchanged: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMoved(Event):
    """Parameters meant frozen that an optimizer moved. ``why`` they are meant frozen: "requires_grad is False",
    "gradient zeroed by hand", "no contribution". ``change``: the largest change of an element so far."""

    optimizer: int
    parameters: int
    why: str
    name: str | None = None
    updates: int = 1
    change: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPassed(Event):
    """One pass of a loader (or of a hand-drawn permutation) through its data; ``at``: the line that iterates.

    ``source``: number of the data; ``began``: contributions before the pass; ``repeats``: batches from the first on
    that held the very indices of the pass before it; ``shuffles``: whether its sampler means to shuffle.
    """

    source: int
    sampler: str
    shuffles: bool
    began: int
    batches: int
    indices: int
    repeats: int = 0
    whole: bool = True
    sampler_epoch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsKept(Event):
    """Graphs of earlier contributions that something keeps alive.

    ``graphs`` of the last ``asked`` contributions; ``tensors``: living tensors that carry a graph; ``growth`` of that
    number an update; ``holder``: the variable that keeps them, where it was found (``at``: where it grows).
    """

    graphs: int
    asked: int
    tensors: int | None = None
    growth: float | None = None
    holder: str | None = None


# -- regions and modules -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastEntered(Event):
    """``made_at``: where the context was made, if not where it was entered."""

    region: int
    device: str
    dtype: str
    enabled: bool
    depth: int = 1
    thread: int = 0
    made_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastLeft(Event):
    """``raised``: an exception left it."""

    region: int
    raised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedOff(Event):
    """An autocast region or a scaler ("autocast", "scaler") asked to be on that turned itself off when it was made."""

    what: str
    device: str
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastLost(Event):
    """A module trained by ``optimizers`` ran in a thread without autocast while another thread was inside a region.

    ``entered_at``, ``dtype``: that region's. ``at``: the call, or where the other thread waited for it.
    """

    type: str
    dtype: str
    thread: int = 0
    entered_at: Place | None = None
    optimizers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleCasts(Event):
    """A backward through half-precision copies of weights that were made before the weights changed.

    ``region``: the outermost region open, which keeps the copies, entered at ``entered_at``; ``casts``: how many;
    ``changed``: whether the weights differ from what was copied; ``backwards``: so many in this region by now.
    """

    region: int
    entered_at: Place | None = None
    casts: int = 0
    changed: bool | None = None
    backwards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardDowncast(Event):
    """Gradient operators of an FP32 forward that autocast ran in ``dtype``, since backward was called inside a region.

    ``operators``: how many; ``operator`` and ``node``: the first of them and its autograd node. ``second``: of a second
    derivative.
    """

    dtype: str
    operators: int
    operator: str = ""
    node: str = ""
    second: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfInOffRegion(Event):
    """An operator inside a region with autocast off that computed in ``dtype``: its input came so from outside.

    ``at``: the operator; ``entered_at``: the region.
    """

    operator: str
    dtype: str
    region: int
    entered_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed(Event):
    """A checkpointed forward beside its recomputation in backward; ``at``: the call, or what recomputes by hand.

    ``by``: "checkpoint", "reentrant", or the name of a custom function. ``dtype`` and ``autocast`` (half dtype of the
    region, "off" without one) of the first forward, ``again_dtype`` and ``again_autocast`` of the recomputation.
    ``difference``: of the values computed again, relative to their size, the largest of ``tensors`` compared.
    ``drew``: what the first forward drew random numbers from ("default", "python", "numpy", "generator");
    ``drew_at``: where, for a generator of the script's own; ``preserves``: whether the default state is put back.
    """

    by: str
    dtype: str = ""
    again_dtype: str = ""
    autocast: str = ""
    again_autocast: str = ""
    difference: float | None = None
    tensors: int = 0
    drew: tuple[str, ...] = ()
    drew_at: Place | None = None
    preserves: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFailed(Event):
    """The exception that ends the script came from a custom autograd function; told just before `Raised`.

    ``phase``: "forward" or "backward"; ``recomputing``: from a module that backward ran again; ``wrapped``: the
    function has `custom_fwd`.
    """

    function: str
    phase: str
    recomputing: bool = False
    wrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCompiled(Event):
    """A backward was compiled in which gradient operators of an FP32 forward compute in ``dtype``.

    ``at``: the first forward operator so treated; ``setting``: torch's `backward_pass_autocast`.
    """

    dtype: str
    operators: int
    operator: str = ""
    module: str | None = None
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSeen(Event):
    """A root module's first call. ``modal``: kinds of inner modules that act differently in training and evaluation,
    with their number; ``fresh``: its batch statistics have never seen a batch."""

    module: int
    type: str
    parameters: int = 0
    modal: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCalled(Event):
    """A root module's forward (one called by no other module).

    ``optimizers``: those that own some of its parameters. ``mode_at``: where its mode was last set. ``repeated``: on
    the very input of its call before. ``own``: called by code that means this mode (batch statistics renewed).
    """

    module: int
    type: str
    training: bool
    grad_enabled: bool
    autocast: str | None = None
    examples: int | None = None
    optimizers: tuple[int, ...] = ()
    thread: int = 0
    carried: bool = False
    mode_at: Place | None = None
    repeated: bool = False
    own: bool = False


# -- replicas ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMade(Event):
    """The default process group was initialised; ``where``: how its ranks found each other, alike on all of them."""

    rank: int
    world_size: int
    backend: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasMade(Event):
    """A module wrapped for data parallelism, or seen to be: ``how`` is "ddp", "fsdp" or "fsdp1".

    ``ranks``: those that hold a replica (empty: it cannot be told); ``averages``: the backend divides gradients by their
    number; ``hook``: name of a communication hook; ``unused``: "found" or "static" where parameters without gradient
    are provided for.
    """

    module: int
    how: str = "ddp"
    type: str = ""
    ranks: tuple[int, ...] = ()
    averages: bool = True
    hook: str | None = None
    unused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBackward(Event):
    """What a contribution meant to a module wrapped by DDP; told after it.

    ``reduced``: its gradients were averaged over ``ranks``, since its forward asked for that. ``forwards``: of the
    wrapper since the backward before, the last at ``forward_at``; ``forward_synced`` and ``backward_synced``: whether it
    was outside `no_sync` then. ``bypassed_at``: where the wrapped module was called without its wrapper instead.
    ``missing``: names of parameters whose gradient the wrapper still waits for; ``missing_count``: how many.
    """

    contribution: int
    module: int
    optimizers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    reduced: bool = True
    forwards: int = 0
    forward_at: Place | None = None
    forward_synced: bool = True
    backward_synced: bool = True
    bypassed_at: Place | None = None
    missing: tuple[str, ...] = ()
    missing_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged(Event):
    """A collective that the script (or a library) called itself, with ``times`` calls like it in a row.

    ``what``: "gradients" or "parameters" of the ``optimizers``, "buffer" (many numbers), "number" (a few, or integers).
    ``operator``: "all_reduce"...; ``op``: "sum", "avg"...; ``ranks``: of its group.
    """

    what: str
    operator: str
    op: str = ""
    ranks: tuple[int, ...] = ()
    optimizers: tuple[int, ...] = ()
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesSeen(Event):
    """Fingerprints of the examples that a root module was called on, for the contribution to come.

    ``rows``: one number an example, from its content alone; 0 for one of equal values. ``width``: numbers an example;
    ``integers``: they are whole. ``at``: where the loader was made, or the order drawn, or the call; ``source``: which
    of these ("loader", "order", "call"). ``sampler``: the loader's; ``repeats``: it draws with replacement.
    """

    contribution: int
    rows: tuple[int, ...] = ()
    width: int = 0
    integers: bool = False
    source: str = "call"
    sampler: str = ""
    repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersMarked(Event):
    """Two numbers that tell an optimizer's parameters from others: a fixed projection of them, and their norm.

    ``update``: attempts of the optimizer before it (0: at its first contribution).
    """

    optimizer: int
    update: int
    mark: float | None = None
    norm: float | None = None


# -- findings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, with its place, its numbers and its cure; `count` is how often it was seen."""

    rule: str
    severity: Severity
    message: str
    at: Place | None = None
    update: int | None = None
    count: int = 1
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fix: str = ""
    module: str | None = None
    operator: str | None = None
    phase: str | None = None
    rank: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The finding as the `--json` document has it (design, section 4)."""
        out: dict[str, Any] = {
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "file": self.at.file if self.at else None,
            "line": self.at.line if self.at else None,
            "update": self.update,
            "count": self.count,
            "evidence": plain(dict(self.evidence)),
            "fix": self.fix,
        }
        for name in ("module", "operator", "phase", "rank"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out


# -- JSON lines --------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` as strict JSON can hold it: non-finite floats become the strings "inf", "-inf", "nan"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def _kinds(base: type[Event]) -> Iterator[type[Event]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


@functools.cache
def _registry() -> dict[str, type[Event]]:
    return {kind.__name__: kind for kind in _kinds(Event)}


_FIELD = {"kind": "of"}  # a field that bears the name of the line's own key
_NAME = {written: name for name, written in _FIELD.items()}


def encode(event: Event) -> str:
    """One line of JSON: {"kind": class name, fields that differ from their default}."""
    out: dict[str, Any] = {"kind": type(event).__name__}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default or (field.default is dataclasses.MISSING and value is None):
            out[_FIELD.get(field.name, field.name)] = _dump(value)
    return json.dumps(out, separators=(",", ":"))


def _dump(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _dump(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _dump(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dump(v) for v in value]
    return value


def flat(value: Any) -> Any:
    """A record of this module, or values made of them, as plain data for JSON; `restored` reads it back."""
    return _dump(value)


def restored(kind: type[Any], raw: Any) -> Any:
    """What `flat` made of a value of the dataclass ``kind``; names it does not know are passed over."""
    return _load(raw, kind)


def decode(line: str) -> Event | None:
    """The event of a line; None for a kind this version does not know (a later one wrote it)."""
    raw = json.loads(line)
    kind = _registry().get(raw.pop("kind", ""))
    if kind is None:
        return None
    hints = _hints(kind)
    raw = {_NAME.get(name, name): value for name, value in raw.items()}
    return kind(**{name: _load(value, hints[name]) for name, value in raw.items() if name in hints})


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _load(value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (types.UnionType, typing.Union):
        return _load(value, next(a for a in args if a is not type(None)))
    if origin is tuple:
        return tuple(_load(v, args[0]) for v in value)
    if origin is not None and isinstance(value, dict):
        key = args[0] if args else str
        return {(int(k) if key is int else k): v for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        hints = _hints(typing.cast(type, hint))
        return hint(**{k: _load(v, hints[k]) for k, v in value.items() if k in hints})  # type: ignore[operator]
    return value
