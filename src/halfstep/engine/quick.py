"""The usual contribution, with as little Python as it takes: a small model's backward is short enough to notice."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.contribute import Contributor
from halfstep.engine.group import Group
from halfstep.engine.late import host
from halfstep.engine.ledger import Contribution, Mode
from halfstep.engine.reading import read_weight

# torch.autograd.backward spends as long on its arguments as a small backward takes; they are known to be right here.
_RUN: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_known: Any = None
_plain = False


def contribute_quickly(contributor: Contributor, loss: Any, weight: Any, group: Group[Any] | None) -> bool:
    """Add a contribution of one FP32 scalar with a host weight, the ledger and group in order. False: not usual.

    Does what :meth:`Contributor.run` does for it; where it returns False nothing was done.
    """
    if contributor.weigh or contributor.look or not contributor.host or type(loss) is not Tensor:
        return False
    if not contributor.replicas.alone:
        return False
    if loss.dtype is not torch.float32 or loss.dim() or not loss.requires_grad or not _own_backward():
        return False
    ledger = contributor.ledger
    pending = ledger.pending
    mode: Mode = "along"
    weights: tuple[float, ...] | None
    if group is None:
        examples, micro_batch = None, ledger.number
        ledger.number += 1
        if weight is None:
            mode, source, factor, weights = "plain", "none: as the caller scaled it", 1.0, None
        elif type(weight) in (int, float) and 0.0 < weight < math.inf:
            weights = (float(weight),)
            source, factor = "counted along", weights[0] / ledger.anchor(weights, None)  # type: ignore[assignment]
        else:
            return False
    else:
        micro_batch = group.position
        if weight is not None or group.exhausted or micro_batch < 0 or group.reduction != "mean":
            return False
        examples = group.example_counts[micro_batch]
        if group.micro_weights is not None:
            weights = group.micro_weights[micro_batch]
            if len(weights) != 1 or weights[0] == 0.0:
                return False
            assert group.weights is not None
            mode, source, factor = "ahead", "counted ahead", weights[0] / group.weights[0]
        else:
            if pending and pending[-1].micro_batch == micro_batch:
                return False
            read = read_weight(loss, "mean", host=True).weight if contributor.counted_examples is None else None
            if not isinstance(read, float) or read == 0.0:
                return False
            weights = (read,)
            source, factor = "read from the loss", read / ledger.anchor(weights, len(group))  # type: ignore[assignment]
    if pending and (pending[0].mode != mode or (weights is not None and len(pending[0].weights or ()) != 1)):
        return False
    seed = contributor.seed(loss, factor)
    _RUN((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    pending.append(Contribution(mode, source, (host(loss),), (factor,), weights, examples, micro_batch))
    return True


def _own_backward() -> bool:
    """Whether ``torch.autograd.backward`` is torch's own: somebody who put another in its place wants to be called."""
    global _known, _plain
    backward = torch.autograd.backward
    if backward is not _known:
        own = isinstance(backward, FunctionType) and backward.__code__.co_filename == torch.autograd.__file__
        _known, _plain = backward, own and _RUN is not None
    return _plain
