"""What is told of an update so that it can be set beside the same update of another run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.events.base import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTraced(Event):
    """The gradients and the data of an update about to be attempted; only where two runs are compared.

    ``norms``: layer -> norm of its gradient, the loss scale divided out, before clipping; empty where this update was
    not sampled. ``weights``: layer -> norm of its parameters, at the optimizer's first update. ``random``: the state of
    torch's generators as one number. ``whole``, ``real``: projections of the whole-number and of the floating-point
    data since the last update (sampled elements of what loaders gave and root modules were called with), ``size``: the
    norm of the latter.
    """

    optimizer: int
    norms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    random: int = 0
    whole: float = 0.0
    real: float = 0.0
    size: float = 0.0
