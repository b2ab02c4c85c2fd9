"""Values: where they stopped being finite, rounded away or saturated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.events.base import Event, Place


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
    ``in_optimizer``: it was made inside an optimizer's update. ``spoiled`` of the ``gradients`` that the backward gave
    to parameters are not finite, where the loss was.
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
    spoiled: int | None = None
    gradients: int | None = None


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
    the forward line and the gradient operator that lost most. ``fitting``: the power of two that the scale could be;
    ``needed``: how many times larger it would have to be to keep most of what was lost.
    """

    scale: float | None = None
    dtype: str = "float16"
    layers: tuple[LayerGradient, ...] = ()
    activations: tuple[LayerGradient, ...] = ()
    worst_by: str | None = None
    worst_at: Place | None = None
    worst_module: str | None = None
    fitting: float | None = None
    needed: float | None = None
