"""What was not finite in an update: parameters by their norms, ranks and micro-batches by their losses."""

from __future__ import annotations

import math

from torch import Tensor

from halfstep.engine.ledger import Share
from halfstep.engine.replicas.collectives import rank
from halfstep.engine.replicas.replicas import Replicas

_SHOWN = 4  # micro-batches named a rank


def culprits(replicas: Replicas | None, share: Share) -> str:
    """The micro-batches whose loss was not finite, as words: on every rank, a collective, or here (None)."""
    own = [c.micro_batch for c in share.contributions if not c.empty and not all(map(_finite, c.losses))]
    first = min((c.micro_batch for c in share.contributions), default=0)  # outside groups they are numbered on
    row = [rank(), len(own), *[place - first + 1 for place in own[:_SHOWN]], *[0] * (_SHOWN - len(own))]
    named = []
    for member, count, *places in [row] if replicas is None else replicas.gather(row):
        if count:
            which = ", ".join(str(place) for place in places[:count]) + (", …" if count > _SHOWN else "")
            named.append(f"micro-batch{'es' * (count > 1)} {which} on rank {member}")
    if named:
        return f"the loss of {' and of '.join(named)} was not finite"
    if replicas is None:
        return f"every loss was finite on rank {rank()}; others tell theirs at the next update"
    return "every loss was finite on every rank: a gradient overflowed in backward"


def _finite(loss: float | Tensor) -> bool:
    return math.isfinite(loss)


def nonfinite_names(names: list[str], norms: Tensor | None) -> str:
    """Which gradients are not finite, as words."""
    if norms is None:
        return "parameters that were not looked at"
    bad = [name for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)]
    if not bad:
        return "no single parameter: the total norm overflowed"
    shown = ", ".join(bad[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
    return f"{shown} ({len(bad)} of {len(names)} parameters)"
