"""What a comparison found, as values: of a model, and of each of its modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from halfstep.errors import PolicyError, counted
from halfstep.events import plain
from halfstep.probe.micro_batch.exponents import LOWEST_SCALE, Exponents, Fit
from halfstep.probe.micro_batch.modules import Difference
from halfstep.probe.micro_batch.overflow import Overflow
from halfstep.probe.micro_batch.passes import Passes
from halfstep.probe.table import percent, power

if TYPE_CHECKING:
    from halfstep.probe.micro_batch.remedies import Cure


@dataclass(frozen=True)
class ModuleComparison:
    """One module, half precision against FP32, over all its calls in the micro-batch.

    ``output`` and ``gradient`` (the one that arrived at its output, unscaled); ``weights``: the gradient of its own
    parameters, those of modules inside it apart. ``lost`` and ``subnormal``: shares of the elements of ``gradient``
    that FP32 keeps and half precision turned to zero, or to numbers of fewer digits; ``lost_norm``: what share of
    the gradient's norm the zeros had. None where nothing was compared or nothing was in half precision.
    """

    name: str
    kind: str
    order: int
    """When its first output came: 0 is the first module that returned."""
    dtype: str
    output: Difference | None
    gradient: Difference | None
    weights: Difference | None
    lost: float | None
    subnormal: float | None
    lost_norm: float | None
    output_exponents: Exponents = field(repr=False)
    gradient_exponents: Exponents = field(repr=False)

    @property
    def worst(self) -> float:
        """The largest of its errors."""
        return max((d.error for d in (self.output, self.gradient, self.weights) if d is not None), default=0.0)


@dataclass(frozen=True, repr=False)
class Comparison:
    """What :func:`compare` found. ``print`` it, or take ``as_dict()``; ``cure()`` tries remedies.

    ``modules`` are ranked, the largest error first. ``parted`` and ``gradient_parted`` name the first module, in the
    order of the forward and of the backward, whose error is beyond ``tolerance``. ``overflow``: the first operator
    that made a non-finite value which mattered. ``scale`` is the loss scale its gradients were measured with, lower
    than ``asked_scale`` where that one overflowed. ``fit``: the loss scale that suits this micro-batch.
    ``gradient``: over all parameters together.
    """

    precision: str
    device: str
    loss: float
    full_loss: float
    scale: float
    asked_scale: float
    tolerance: float
    rounding: float | None
    """How far random errors of one rounding a module move FP32's own gradient; None where that was not needed."""
    gradient: Difference | None
    spoiled: tuple[str, ...]
    """Parameters whose gradient is not finite in half precision, at ``asked_scale``."""
    full_spoiled: tuple[str, ...]
    """And in FP32."""
    overflow: Overflow | None
    parted: str | None
    gradient_parted: str | None
    modules: tuple[ModuleComparison, ...]
    starved: tuple[str, ...]
    """Modules that lose more of their gradient's norm to zero than ``tolerance``, most first; not those whose FP32
    gradient is itself nothing but rounding."""
    fit: Fit | None
    underflow: tuple[str, float] | None
    """The operator that lost the largest share of its gradient elements to zero, and the share (FP16)."""
    notes: tuple[str, ...]
    _passes: Passes = field(repr=False, compare=False)
    _region: Callable[[], AbstractContextManager[Any]] = field(repr=False, compare=False)
    _asked_tolerance: float | None = field(repr=False, compare=False)

    @property
    def finite(self) -> bool:
        """Whether half precision gives a finite loss and finite gradients at the loss scale that was asked for."""
        return math.isfinite(self.loss) and not self.spoiled

    @property
    def to_blame(self) -> bool | None:
        """Whether precision is to blame: None where the loss scale alone is, which settles by itself down to 2^-8."""
        if not math.isfinite(self.full_loss) or self.full_spoiled:
            return False
        if not self.finite and math.isfinite(self.loss) and self.scale < self.asked_scale and self._agrees:
            return True if self.starved else None
        return not self.finite or not self._agrees or bool(self.starved)

    @property
    def _agrees(self) -> bool:
        return self.gradient is None or self.gradient.error <= self.tolerance

    @property
    def verdict(self) -> str:
        """In words."""
        name = self.precision.upper()
        apart = "nothing to compare" if self.gradient is None else f"{percent(self.gradient.error)} apart"
        explains = f"rounding explains {percent(self.tolerance)}"
        if self.rounding is not None:
            explains = f"random errors of one rounding a module move FP32's own by {percent(self.rounding)}"
        if not math.isfinite(self.full_loss) or self.full_spoiled:
            return f"precision is not to blame: FP32 gives {_spoilt(self.full_loss, self.full_spoiled)}"
        if self.to_blame is False:
            return f"precision is not to blame: the gradients are {apart}, {explains}"
        if self.to_blame is None:
            return (
                f"only the loss scale is: gradients overflow at {power(self.asked_scale)}, and are finite and {apart} "
                f"at {power(self.scale)}"
                + (f", below {power(LOWEST_SCALE)}, where it stops falling" if self.scale < LOWEST_SCALE else "")
            )
        if self._agrees and self.starved:
            worst = self.module(self.starved[0])
            return (
                f"precision is to blame: half precision turns up to {percent(worst.lost_norm)} of a gradient's norm to "
                f"zero in {counted(len(self.starved), 'module')}, most in {worst.name or 'the model itself'}"
            )
        if not self.finite:
            return f"precision is to blame: {name} gives {_spoilt(self.loss, self.spoiled)}, FP32 is finite"
        return f"precision is to blame: the gradients are {apart}, {explains}"

    @property
    def suspect(self) -> str | None:
        """The module to look at first: where it overflowed, parted, or lost most; None where that is outside of all."""
        if self.overflow is not None and not self.overflow.by_scale_alone:
            return self.overflow.module
        if self.parted is not None:
            return self.parted
        inside = [name for name in self.starved if name]
        return inside[0] if inside else self.gradient_parted

    def module(self, name: str) -> ModuleComparison:
        """The comparison of the module of this name. Raises :class:`~halfstep.errors.PolicyError`."""
        for found in self.modules:
            if found.name == name:
                return found
        raise PolicyError(
            f'no module called "{name}" was compared', f"one of {', '.join(m.name for m in self.modules)}"
        )

    def cure(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        updates: int = 8,
        rate: float = 0.1,
        max_norm: float = 2.0,
    ) -> Cure:
        """Try remedies on the same micro-batch, with the model as it is now, and say which help, with numbers.

        Tried, each by running the micro-batch again: another first scale, the smallest island (modules, or the operator
        alone) that is enough, BF16, a normalisation before the layer at fault, a smaller micro-batch, clipping to
        ``max_norm``, and, given the ``optimizer``, ``rate`` times the learning rate for that layer: ``updates`` FP32
        updates with this micro-batch on copies of model and optimizer. Nothing changes, as in :func:`compare`.
        ``print`` what it returns; ``.line`` is the line to paste.

        Raises :class:`~halfstep.errors.PolicyError` for settings that cannot be meant, and
        :class:`~halfstep.errors.MisuseError` for the optimizer of another model.
        """
        from halfstep.probe.micro_batch.remedies import cure

        return cure(self, optimizer, updates=updates, rate=rate, max_norm=max_norm)

    def exponents(self) -> str:
        """A chart of log₂ magnitudes, a layer a line: FP32 outputs and unscaled FP32 gradients, against the range."""
        from halfstep.probe.micro_batch.shown import chart

        return chart(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain data. Histograms are {exponent: elements}; errors that are not finite are the string "inf"."""
        fields = {
            name: getattr(self, name)
            for name in (
                "precision",
                "device",
                "loss",
                "full_loss",
                "scale",
                "asked_scale",
                "tolerance",
                "rounding",
                "finite",
            )
        }
        fields |= {name: getattr(self, name) for name in ("to_blame", "verdict", "parted", "gradient_parted")}
        fields |= {name: list(getattr(self, name)) for name in ("spoiled", "full_spoiled", "starved", "notes")}
        fields["gradient"] = None if self.gradient is None else asdict(self.gradient)
        fields["overflow"] = None if self.overflow is None else self.overflow.as_dict()
        fields["fit"] = None if self.fit is None else asdict(self.fit)
        fields["underflow"] = self.underflow and {"operator": self.underflow[0], "share": self.underflow[1]}
        fields["modules"] = [asdict(m) for m in self.modules]
        return cast(dict[str, Any], plain(fields))

    def __repr__(self) -> str:
        return f"Comparison({self.precision}, {len(self.modules)} modules, {self.verdict!r})"

    def __str__(self) -> str:
        from halfstep.probe.micro_batch.shown import shown

        return shown(self)


def _spoilt(loss: float, spoiled: tuple[str, ...]) -> str:
    if not math.isfinite(loss):
        return f"a loss of {loss}"
    shown = ", ".join(spoiled[:3]) + (f" and {len(spoiled) - 3} more" if len(spoiled) > 3 else "")
    return f"gradients that are not finite in {shown}"
