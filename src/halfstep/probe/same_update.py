"""One line for anybody's test: the accumulated gradient is the big batch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.engine.settings import number
from halfstep.errors import MisuseError, NonFiniteError, PolicyError, UpdateDiffersError
from halfstep.probe.difference import Cause, causes_of
from halfstep.probe.micro_batch.passes import unwatched
from halfstep.probe.trial import TOLERANCES, Trial, norm, unchanged
from halfstep.probe.whole import joined

_SHARE = "a share of the contributions' norms, 0 or more; leave it out for the precision's own"


@dataclass(frozen=True)
class SameUpdate:
    """How far the accumulated gradient is from the big batch's, and why."""

    same: bool
    error: float
    """‖accumulated − big‖ / Σ‖contribution‖, over all parameters."""
    tolerance: float
    dtype: torch.dtype
    """The lowest precision a floating-point result was seen in; it decides the tolerance where none is given."""
    shares: tuple[float, ...]
    """What each micro-batch's gradient was multiplied by: 1/A, or w/W, or 1 for sums."""
    contribution_norms: tuple[float, ...]
    big_norm: float
    losses: tuple[float, ...]
    """Of each micro-batch, as ``loss_fn`` returned it; NaN for one of weight 0, which is not run."""
    big_loss: float
    worst: tuple[tuple[str, float], ...]
    """The parameters that differ most: (name, share of the difference), at most three."""
    causes: tuple[Cause, ...]
    """Why they differ, found by trying it again; empty where they do not."""

    def __bool__(self) -> bool:
        return self.same


def assert_same_update(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    weight: Callable[[Any], float | Tensor] | None = None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    big: Any = None,
    tolerance: float | None = None,
) -> SameUpdate:
    """Assert that accumulating ``loss_fn`` over ``batches`` gives the gradient of ``loss_fn`` over all of them at once.

    What is accumulated, over the A micro-batches, is what your loop adds up:

    - ``weight=None``: ``loss_fn(model, batch) / A``, the usual recipe;
    - ``weight=function``: ``loss_fn(model, batch) · w / W`` with ``w = weight(batch)`` and ``W`` their sum
      (``halfstep.tokens("labels")`` counts supervised tokens); a micro-batch of weight 0 is not run;
    - ``reduction="sum"``: ``loss_fn(model, batch)`` as it is, for losses that are sums.

    ``big`` is the big batch; by default the batches are joined along dimension 0 (see
    :func:`halfstep.probe.whole.joined`), which ragged shapes do not allow. ``tolerance`` is relative to Σ‖contribution‖
    and by default that of the lowest precision seen: FP64 1e-12, FP32 1e-5, FP16 5e-3, BF16 3e-2.

    Nothing changes: parameters, gradients, buffers, training modes and random state (torch's, Python's, NumPy's) are
    afterwards as before. Parameters and buffers are held twice meanwhile. Gradients are taken by ``backward()``, so
    hooks on parameters run.

    Returns a :class:`SameUpdate`. Raises :class:`~halfstep.errors.UpdateDiffersError` (an ``AssertionError``) that
    names the cause with its numbers, and :class:`~halfstep.errors.NonFiniteError` where nothing can be compared.
    """
    found = measure_update(model, loss_fn, batches, weight, reduction=reduction, big=big, tolerance=tolerance)
    if not found.same:
        where = ", ".join(f"{name} ({share:.0%})" for name, share in found.worst)
        seen = (
            f"the gradient accumulated over {len(found.shares)} micro-batches is {_percent(found.error)} off the big "
            f"batch's (tolerance {_percent(found.tolerance)}, {str(found.dtype).removeprefix('torch.')}), most of it "
            f"in {where}" + "".join(f"\n  {cause.name}: {cause.seen}" for cause in found.causes)
        )
        raise UpdateDiffersError(seen, "\n  fix: ".join(cause.fix for cause in found.causes))
    return found


def measure_update(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    weight: Callable[[Any], float | Tensor] | None = None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    big: Any = None,
    tolerance: float | None = None,
) -> SameUpdate:
    """What :func:`assert_same_update` asserts, as a value: it does not raise where the gradients differ."""
    if not isinstance(model, nn.Module):
        swapped = isinstance(loss_fn, nn.Module)
        raise MisuseError(
            f"the model is a {type(model).__name__}"
            + (f", the loss function a {type(loss_fn).__name__}: they stand the other way round" if swapped else ""),
            "assert_same_update(model, loss_fn, batches)",
        )
    if weight is not None and not callable(weight):
        raise PolicyError(
            f"weight={weight!r} is no function of a micro-batch", 'halfstep.tokens("labels"), or lambda batch: …'
        )
    if tolerance is not None and not number("tolerance", tolerance, _SHARE) >= 0.0:
        raise PolicyError(f"tolerance={tolerance} is no tolerance", _SHARE)
    parts = list(batches)
    if not parts:
        raise PolicyError("there are no batches to accumulate over", "pass the micro-batches of one group, as a list")
    trial = Trial(model, loss_fn, parts, joined(parts) if big is None else big, _shares(parts, weight, reduction))
    return measured(trial, tolerance)[0]


def measured(trial: Trial, tolerance: float | None) -> tuple[SameUpdate, dict[str, Tensor]]:
    """What a trial shows, and the accumulated gradient by parameter name. The model is afterwards as it was."""
    count = len(trial.batches)
    with unwatched(), unchanged(trial.model):
        whole = trial.big()
        accumulated, contributions = trial.accumulated()
        for name, run in [("the big batch", whole), *((f"micro-batch {k}", run) for k, run in contributions.items())]:
            _require_finite(name, run.loss, run.gradients)
        difference = {
            name: accumulated[name].double() - gradient.double() for name, gradient in whole.gradients.items()
        }
        norms = tuple(norm(contributions[k].gradients) if k in contributions else 0.0 for k in range(count))
        size = sum(norms) or norm(whole.gradients)
        error = norm(difference) / size if size else 0.0
        dtype = max((run.dtype for run in [whole, *contributions.values()]), key=lambda kind: TOLERANCES[kind])
        limit = TOLERANCES[dtype] if tolerance is None else tolerance
        same = error <= limit
        causes = () if same else causes_of(trial, limit, error)
    found = SameUpdate(
        same,
        error,
        limit,
        dtype,
        trial.shares,
        norms,
        norm(whole.gradients),
        tuple(contributions[k].loss if k in contributions else math.nan for k in range(count)),
        whole.loss,
        _worst(difference),
        causes,
    )
    return found, accumulated


def _shares(
    batches: list[Any], weight: Callable[[Any], float | Tensor] | None, reduction: Literal["mean", "sum"]
) -> tuple[float, ...]:
    if reduction not in ("mean", "sum"):
        raise PolicyError(f'reduction is "{reduction}"', 'say "mean" (weighed by weight, or 1/A) or "sum"')
    if reduction == "sum":
        if weight is not None:
            raise PolicyError("a sum is accumulated as it is, yet a weight was given", "leave out one of the two")
        return (1.0,) * len(batches)
    if weight is None:
        return (1.0 / len(batches),) * len(batches)
    weights = [float(weight(batch)) for batch in batches]
    if any(not math.isfinite(value) or value < 0 for value in weights):
        raise PolicyError(f"the weights are {weights}", "a weight is a number of supervised elements, 0 or more")
    total = sum(weights)
    if total == 0:
        raise MisuseError("every micro-batch weighs 0: nothing is supervised", "pass batches that hold targets")
    return tuple(value / total for value in weights)


def _require_finite(name: str, loss: float, gradients: dict[str, Tensor]) -> None:
    bad = [parameter for parameter, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
    if bad or not math.isfinite(loss):
        where = f", its gradient not finite in {', '.join(bad[:3])}" if bad else ""
        raise NonFiniteError(
            f"the loss of {name} is {loss:.6g}{where}: there is nothing to compare",
            "a micro-batch without supervised elements is left out by weight= (0 for it); else look for the overflow",
        )


def _worst(difference: dict[str, Tensor]) -> tuple[tuple[str, float], ...]:
    squares = {name: float((tensor**2).sum()) for name, tensor in difference.items()}
    total = sum(squares.values())
    names = sorted(squares, key=lambda name: -squares[name])[:3]
    return tuple((name, math.sqrt(squares[name] / total)) for name in names if squares[name] > 0)


def _percent(value: float) -> str:
    return f"{value:.1%}" if value >= 1e-3 else f"{value:.1e}"
