"""Reasons for later trouble, noted of operators whose own outputs are finite, and told where they do harm already.

An epsilon that rounded to zero, a probability that is exactly 0 or 1, a division of nothing by nothing: the search for
a culprit finds these among the inputs of the operator that made a non-finite value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import ProbabilitiesSaturated
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.provenance import Origin, Provenance
from halfstep.watch.ranges import HALF

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_PROBABILITIES = frozenset(("sigmoid", "sigmoid_", "_softmax", "hardsigmoid"))
_ADDS = frozenset(("add", "add_", "sub", "sub_", "rsub"))
_FLOORS = frozenset(("clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"))
_CONSTANTS = frozenset(("_to_copy", "full", "full_like", "scalar_tensor", "new_full", "fill_"))
_LOSSES = frozenset(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss_forward"))
_SUM = 2  # torch's number for reduction="sum"
_QUOTIENTS = frozenset(("div", "div_"))
_NEAR = 3


class Notes:
    def __init__(self, session: Session, provenance: Provenance) -> None:
        self._session = session
        self._provenance = provenance
        self._saturated: list[dict[str, Any]] = []

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        origin = self._provenance.now
        if origin is None or operation.backward:
            return
        name = origin.name
        if origin.finite:
            if origin.dtype in HALF:
                self._note(operation, origin, name)
            if name == "binary_cross_entropy":
                self._entropy(operation, origin)
        elif origin.nan and not origin.bad and _is_empty(operation, origin):
            origin.facts["empty"] = True
        elif name in _LOSSES and _SUM in operation.args[2:4]:
            origin.facts["summed"] = True

    def _note(self, operation: Operation, origin: Origin, name: str) -> None:
        if name in _PROBABILITIES:
            if origin.high == 1.0 or origin.low == 0.0:
                out = operation.out
                origin.facts["saturated"] = int(((out == 0) | (out == 1)).sum())
        elif name in _ADDS or name in _FLOORS:
            epsilon = self._vanished(operation, origin.dtype)
            if epsilon is not None and (origin.low == 0.0 or origin.high == 0.0 or bool((operation.out == 0).any())):
                origin.facts["epsilon"] = epsilon
        elif name in _CONSTANTS:
            self._constant(operation, origin, name)

    def _vanished(self, operation: Operation, dtype: torch.dtype) -> float | None:
        """The number added or clamped to, where it is too small for this dtype."""
        for value in operation.args[1:2]:
            if isinstance(value, torch.Tensor):
                source = self._provenance.of(value) if value.dim() == 0 else None
                if source is not None and "epsilon" in source.facts:
                    return float(source.facts["epsilon"])
                value = source.high if source is not None and source.low == source.high else None
            if isinstance(value, float) and 0.0 < abs(value) <= _smallest(dtype) / 2:
                return value
        return None

    def _constant(self, operation: Operation, origin: Origin, name: str) -> None:
        if name == "_to_copy":
            source = self._provenance.of(operation.args[0])
            if source is None:
                return
            if operation.out.numel() == 1 and origin.high == 0.0 and source.high != 0.0 and source.finite:
                origin.facts["epsilon"] = source.high
            if source.low >= 0.0 and source.high <= 1.0 and source.facts.get("saturated") is None:
                rounded = (source.high < 1.0 == origin.high) or (origin.low == 0.0 < source.low)
                if rounded and any(o.name in _PROBABILITIES for o in source.upstream(1)):
                    origin.facts["saturated"] = int(((operation.out == 0) | (operation.out == 1)).sum())
            return
        for value in operation.args:
            if isinstance(value, float) and 0.0 < abs(value) <= _smallest(origin.dtype) / 2:
                origin.facts["epsilon"] = value

    # -- a loss on probabilities ---------------------------------------------------------------------------------

    def _entropy(self, operation: Operation, origin: Origin) -> None:
        given, target = operation.args[0], operation.args[1]
        source = self._provenance.of(given)
        made = next((o for o in source.upstream(_NEAR) if "saturated" in o.facts), None) if source is not None else None
        if made is None or not isinstance(target, torch.Tensor):
            return
        against = int((((given == 1) & (target < 1)) | ((given == 0) & (target > 0))).sum())
        if against:
            self._saturated.append(
                {
                    "at": origin.at,
                    "dtype": str(made.dtype).removeprefix("torch."),
                    "count": against,
                    "of": given.numel(),
                    "operator": made.name,
                    "made_at": made.at,
                    "module": made.path,
                }
            )

    def tell(self) -> None:
        """After a backward: the losses on saturated probabilities that went into it."""
        saturated, self._saturated = self._saturated, []
        for fields in saturated[:4]:
            self._session.stream.emit(ProbabilitiesSaturated, **fields)


def _is_empty(operation: Operation, origin: Origin) -> bool:
    """NaN because there was nothing: a mean over no element, a sum of nothing divided by its count."""
    if any(t.numel() == 0 for t in operation.tensors() if t.is_floating_point()):
        return True
    if origin.name.startswith("nll_loss"):
        total = operation.out[1] if isinstance(operation.out, (tuple, list)) else None
        return isinstance(total, torch.Tensor) and total.numel() == 1 and float(total) == 0.0
    return (
        origin.name in _QUOTIENTS
        and isinstance(operation.out, torch.Tensor)
        and operation.out.numel() == 1
        and origin.facts.get("peak") == 0.0
    )


def _smallest(dtype: torch.dtype) -> float:
    """The smallest number above zero, subnormal ones included."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps if math.isfinite(info.eps) else 0.0
