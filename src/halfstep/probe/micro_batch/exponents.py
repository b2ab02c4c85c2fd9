"""Powers of two: where the magnitudes of a tensor lie, what a dtype loses of them, and the loss scale that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

DEFAULT_SCALE = 2.0**16
"""Where torch's scaler, and halfstep's, start."""
LOWEST_SCALE = 2.0**-8
"""Where halfstep's scale stops falling unless told otherwise (``min_scale``)."""
HEADROOM = 3
"""Doublings left free above the largest gradient seen: another micro-batch's may be eight times as large."""
_NEGLIGIBLE = 1e-3
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Exponents:
    """A histogram of log₂ magnitudes: ``counts[e]`` elements have 2^e ≤ |x| < 2^(e+1).

    ``zeros`` and ``nonfinite`` are counted apart. ``peak`` is the largest finite magnitude, 0 where there is none.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    nonfinite: int = 0
    peak: float = 0.0

    @property
    def kept(self) -> int:
        """The elements that are finite and not zero: those that a narrower dtype could lose."""
        return sum(self.counts.values())

    def lost(self, dtype: torch.dtype, scale: float = 1.0) -> float:
        """The share of `kept` that ``dtype`` rounds to zero once multiplied by ``scale`` (a power of two)."""
        # Halfway between zero and the smallest subnormal number rounds to even, to zero.
        return self._share_below(math.log2(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2), scale)

    def subnormal(self, dtype: torch.dtype, scale: float = 1.0) -> float:
        """The share of `kept` that keeps fewer digits than the dtype has, or is lost, once multiplied by ``scale``."""
        return self._share_below(math.log2(torch.finfo(dtype).smallest_normal), scale)

    def beyond(self, dtype: torch.dtype, scale: float = 1.0) -> float:
        """The share of `kept` that is infinite in ``dtype`` once multiplied by ``scale``."""
        first = math.ceil(math.log2(torch.finfo(dtype).max)) - math.log2(scale)
        return self._share(e >= first for e in self.counts)

    def _share_below(self, limit: float, scale: float) -> float:
        return self._share(e + math.log2(scale) < limit for e in self.counts)

    def _share(self, chosen: Iterable[bool]) -> float:
        total = self.kept
        return sum(n for n, is_in in zip(self.counts.values(), chosen, strict=True) if is_in) / total if total else 0.0

    def __add__(self, other: Exponents) -> Exponents:
        counts = dict(self.counts)
        for exponent, count in other.counts.items():
            counts[exponent] = counts.get(exponent, 0) + count
        return Exponents(
            dict(sorted(counts.items())),
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            max(self.peak, other.peak),
        )

    def bars(self, low: int, high: int, wide: int = 2) -> str:
        """One character for ``wide`` powers of two each, from 2^low to 2^high; what lies outside is in the end ones."""
        cells = [0] * ((high - low + wide - 1) // wide)
        for exponent, count in self.counts.items():
            cells[min(max((exponent - low) // wide, 0), len(cells) - 1)] += count
        most = max(cells, default=0)
        # The root of the share: a thousandth is still seen.
        return "".join(_BARS[math.ceil(8 * math.sqrt(cell / most))] if cell else " " for cell in cells)


def exponents(tensor: Tensor) -> Exponents:
    """The histogram of one tensor's magnitudes."""
    values = tensor.detach().reshape(-1)
    values = (values if values.dtype is torch.float64 else values.float()).abs()
    finite = values[torch.isfinite(values)]
    positive = finite[finite > 0]
    if not positive.numel():
        return Exponents({}, finite.numel(), values.numel() - finite.numel())
    powers = torch.frexp(positive).exponent - 1  # frexp's mantissa lies in [½, 1)
    low = int(powers.min())
    counts = torch.bincount(powers - low).tolist()
    return Exponents(
        {low + k: count for k, count in enumerate(counts) if count},
        finite.numel() - positive.numel(),
        values.numel() - finite.numel(),
        float(positive.max()),
    )


@dataclass(frozen=True)
class Fit:
    """The loss scale that suits one micro-batch's gradients in half precision.

    ``scale``: a power of two, for ``init_scale``. ``doublings``: how often it may double before the largest of these
    gradients overflows. ``lost``: the share of gradient elements that round to zero all the same. ``default_lost`` and
    ``default_overflows``: what 2^16 would do.
    """

    scale: float
    doublings: int
    lost: float
    default_lost: float
    default_overflows: bool


def fitting_scale(gradients: Exponents, dtype: torch.dtype, *, headroom: int = HEADROOM) -> Fit | None:
    """The scale that fits these (unscaled) gradients; None where there are none.

    It is 2^16 where that loses nothing worth mention (a thousandth of the elements) and leaves ``headroom`` doublings;
    else the largest that leaves them. One below 2^-8 needs a ``min_scale`` of its own, too. Only the gradients given
    are fitted: run a pass with it to be sure.
    """
    if not gradients.kept:
        return None
    top = math.floor(math.log2(torch.finfo(dtype).max / gradients.peak))
    highest = 2.0 ** max(min(top - headroom, 126), -126)
    lost = gradients.lost(dtype, DEFAULT_SCALE)
    scale = DEFAULT_SCALE if highest >= DEFAULT_SCALE and lost < _NEGLIGIBLE else highest
    return Fit(
        scale, top - int(math.log2(scale)), gradients.lost(dtype, scale), lost, top < int(math.log2(DEFAULT_SCALE))
    )
