"""One group of all replicas: the gradient that comes of the engine's exchange, and what everybody contributed to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.engine.manager import MixedPrecisionManager
from halfstep.engine.scale import SCALE_MIN
from halfstep.errors import HalfstepError
from halfstep.probe.micro_batch.passes import unwatched
from halfstep.probe.preflight.checklist import Row, failed, not_judged
from halfstep.probe.preflight.flight import Flight
from halfstep.probe.preflight.ranks import Share
from halfstep.probe.trial import TOLERANCES, norm, unchanged


class Reading(torch.optim.Optimizer):
    """Keeps the gradients it is given, and moves nothing."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.read: dict[int, Tensor] = {}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.read |= {id(p): p.grad.detach().clone() for p in group["params"] if p.grad is not None}


def row(flight: Flight, shares: Sequence[Share]) -> Row:
    """Whether the group's gradient is Σ w·g / W over all replicas (law 2). Every rank calls it; it is collective."""
    if any(share.numbers.get("weight") is None or "dtype" not in share.numbers for share in shares):
        return not_judged("exchange", "not every rank's own share could be judged")
    try:
        with unwatched(), unchanged(flight.module), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the engine says of replicas, it says in the run
            return _row(flight, shares)
    except HalfstepError as error:
        return failed("exchange", error)


def _row(flight: Flight, shares: Sequence[Share]) -> Row:
    twin = _twin(flight, shares)
    reading = Reading(p for p in flight.module.parameters() if p.requires_grad)
    size = max(int(share.numbers["micro_batches"]) for share in shares)
    settings: dict[str, Any] = {"weight": flight.weight, "reduction": flight.reduction, "model": flight.given}
    try:
        for group in twin.groups(flight.group, size, **settings):
            for batch in group:
                with twin.context():
                    loss = flight.given_loss(flight.given, batch)
                twin.backward(loss)
            update = twin.step(flight.given, reading)
    finally:
        twin.discard()
        twin._order.witnesses.keep([], frozenset(), [])
    replicas = twin.replicas
    if replicas.degree != len(shares):
        return not_judged("exchange", f"D = {replicas.degree} of {len(shares)} ranks ({replicas.how})")
    if not update.applied:
        return not_judged("exchange", f"the update of all was {update.outcome}")
    weights = [float(share.numbers["weight"]) for share in shares]
    difference: dict[str, Tensor] = {}
    sizes = norm(flight.accumulated) * weights[dist.get_rank()]
    for parameter in flight.module.parameters():
        if not parameter.requires_grad:
            continue
        name = flight.names[id(parameter)]
        total = flight.accumulated[name].double() * weights[dist.get_rank()]
        dist.all_reduce(total)
        read = reading.read.get(id(parameter))
        difference[name] = total / sum(weights) - (0.0 if read is None else read.double())
    together = torch.tensor([sizes, norm(difference)], dtype=torch.float64, device=total.device)
    dist.all_reduce(together)  # errors too: all ranks say the same
    error = float(together[1] / together[0]) * sum(weights) / len(shares)
    limit = max(TOLERANCES[getattr(torch, str(share.numbers["dtype"]))] for share in shares)
    words = f"D = {replicas.degree}, R = {replicas.averaging} ({replicas.backend})"
    seen = f"{words}: the update's gradient is {error:.1e} off Σ w·g / W over all ranks (tolerance {limit:.0e})"
    numbers = {"error": error, "tolerance": limit, "D": replicas.degree, "R": replicas.averaging}
    if error > limit:
        fix = "; ".join(replicas.notes) or "a communication hook, or a loss that depends on the rank"
        return Row("exchange", "fail", seen, fix, numbers)
    return Row("exchange", "pass", seen, "", numbers)


def _twin(flight: Flight, shares: Sequence[Share]) -> MixedPrecisionManager:
    """The user's policy, replicas included, without clipping, under a scale that fits every rank."""
    changes: dict[str, Any] = {"record": None, "on_nonfinite": "skip", "max_norm": None}
    if flight.twin.scaler.is_enabled():
        changes |= {"init_scale": min(float(share.numbers["scale"]) for share in shares) / 4, "min_scale": SCALE_MIN}
    return MixedPrecisionManager(**flight.manager._settings | changes)
