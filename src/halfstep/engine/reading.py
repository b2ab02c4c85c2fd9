"""Weights read from the loss's own graph, before backward: what its mean divided by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from halfstep.engine.late import host as number
from halfstep.weigh import weigh
from halfstep.weigh.walk import Walk

_BUDGET = 64
_EXACT = 1 << 24  # FP32 counts exactly up to here
_AT_THE_ROOT = {
    "NllLossBackward0": "nll",
    "NllLoss2DBackward0": "nll",
    "MseLossBackward0": "mse",
    "SmoothL1LossBackward0": "smooth_l1",
    "HuberLossBackward0": "huber",
    "BinaryCrossEntropyWithLogitsBackward0": "bce_with_logits",
}
_ELEMENTWISE = ("mse", "smooth_l1", "huber", "bce_with_logits")
_ROUNDING = 1e-5
_EVEN = 0.02  # elements that weigh the same, but for the rounding of BF16
_SAME = 1e-3  # two denominators that agree to this are one


@dataclass(frozen=True, slots=True)
class Reading:
    """``weight`` is what the loss averaged over (of a sum: its supervised elements); None with the reason why not."""

    weight: float | Tensor | None
    why_not: str = ""


def read_weight(loss: Tensor, reduction: str, *, host: bool) -> Reading:
    """The weight of a micro-batch, from its loss. Runs backward through the head of the loss at most, never a model.

    A cross-entropy on an accelerator keeps its count there: with ``host`` False the weight is that tensor, and nothing
    is waited for.
    """
    node = loss.grad_fn
    if node is None:
        return Reading(None, "it is a parameter itself")
    if reduction == "mean" and type(node).__name__ in _AT_THE_ROOT:  # nothing to walk through
        child, index = node.next_functions[0]
        shape = child._input_metadata[index].shape  # type: ignore[union-attr]
        name = _AT_THE_ROOT[type(node).__name__]
        classes = shape[1] if name == "nll" and len(shape) > 1 else 1
        count = _count_of(node, name, math.prod(shape) // classes, host)
        if count is not None:
            return Reading(count)
    walk = Walk(node, _BUDGET, not loss.dim())
    if walk.opaque:
        return Reading(None, f"opaque: {', '.join(walk.opaque)}")
    places = [place for place in walk.places if place.name != "penalty"]
    if not places:
        return Reading(None, "no loss that holds targets was found in it")
    if len(places) == 1 and reduction == "mean" and places[0].kind == "loss":
        count = _count_of(places[0].node, places[0].name, math.prod(places[0].shape), host)
        if count is not None:
            return Reading(count)
    return _probe(loss, places)


def _count_of(node: Any, name: str, elements: int, host: bool) -> Tensor | float | None:
    """The denominator a mean node holds itself: the count of a cross-entropy, the elements of a squared error."""
    if getattr(node, "_saved_reduction", 0) != 1:
        return None
    raw = getattr(node, "_raw_saved_total_weight", None)
    if raw is None:
        return float(elements) if name in _ELEMENTWISE else None
    if raw.unpack_hook is not None or not isinstance(raw.data, Tensor):
        return None
    total: Tensor = raw.data.detach()
    if total.dtype not in (torch.float32, torch.float64) or elements > _EXACT:
        return None  # a count rounded to half precision
    return number(total) if host else total


def _probe(loss: Tensor, places: list[Any]) -> Reading:
    """Run backward from the loss to just below its element losses, and weigh what arrives there."""
    edges = [GradientEdge(child, index) for p in places for child, index in p.node.next_functions if child is not None]
    weighing = weigh(loss)
    try:
        torch.autograd.grad(loss, edges, torch.ones_like(loss), retain_graph=True, allow_unused=True)
        terms = [term for term in weighing.read() if term.loss != "penalty"]
    except RuntimeError as error:
        return Reading(None, str(error).splitlines()[0])
    finally:
        weighing.remove()
    if weighing.opaque:
        return Reading(None, f"opaque: {weighing.opaque}")
    uneven = next((term for term in terms if term.loss == "policy_gradient" or term.spread > _EVEN), None)
    if uneven is not None:
        return Reading(None, f"the elements of its {uneven.loss} do not weigh the same")
    if len({term.loss for term in terms}) < len(terms):
        return Reading(
            None, f"{len(terms)} losses of one kind are averaged in it: how many may differ from one to the next"
        )
    weights = []
    for term in terms:
        if term.supervised == 0:
            weights.append(0.0)
            continue
        weight = (term.weight_sum or term.supervised) if term.reduction == "sum" else term.divisor
        if weight is None or not math.isfinite(weight):
            return Reading(None, f"the number of elements of its {term.loss} is not known")
        whole = round(weight)  # one over a coefficient is a count but for rounding
        weights.append(float(whole if abs(weight - whole) <= _ROUNDING * whole else weight))
    if not weights:
        return Reading(None, "no gradient reached its element losses")
    if max(weights) - min(weights) > _SAME * max(weights):
        shown = ", ".join(f"{term.loss} over {weight:g}" for term, weight in zip(terms, weights, strict=True))
        return Reading(None, f"its terms have denominators of their own ({shown}): give them as a list")
    return Reading(weights[0])
