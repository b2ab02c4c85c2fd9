"""Preflights of several ranks side by side: the same parameters, other examples, the same groups."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halfstep.probe.preflight.checklist import Rank, Row


@dataclass(frozen=True)
class Share:
    """What one rank tells the others."""

    passed: bool
    failed: tuple[str, ...]
    numbers: dict[str, Any]
    parameters: str
    """A digest of names, shapes and values."""
    examples: tuple[Any, ...]
    """Fingerprints, or ids, of its first group."""
    identified: bool
    """Whether these are ids, given by the user."""


def several() -> bool:
    """Whether there is anybody else."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def digest(module: nn.Module) -> str:
    """Of everything in a module's parameters and buffers but random state."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        values = tensor.detach().cpu().contiguous()
        found.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        if values.layout == torch.strided and values.numel():
            found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def gather(share: Share) -> list[Share]:
    """Every rank's share. A collective of the default group."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    return shares


def ranks(shares: Sequence[Share]) -> tuple[Rank, ...]:
    return tuple(Rank(rank, share.passed, share.failed, share.numbers) for rank, share in enumerate(shares))


def row(shares: Sequence[Share]) -> Row:
    """Whether these ranks can make one update together."""
    faults, told = [], []
    odd = [rank for rank, share in enumerate(shares) if share.parameters != shares[0].parameters]
    if odd:
        faults.append(f"parameters or buffers of rank {_listed(odd)} are not those of rank 0")
    sizes = [share.numbers.get("micro_batches") for share in shares]
    if len(set(sizes)) > 1:
        told.append(f"groups of {_listed(sizes)} micro-batches")
    scales = [share.numbers.get("scale") for share in shares]
    if len(set(scales)) > 1:
        told.append(f"loss scales that fit: {_listed(scales)}, so all settle at the lowest")
    identified = all(share.identified for share in shares)
    where: dict[Any, set[int]] = {}
    for rank, share in enumerate(shares):
        for entry in share.examples:
            where.setdefault(entry, set()).add(rank)
    twice = {entry: on for entry, on in where.items() if len(on) > 1}
    if twice:
        entry, on = next(iter(twice.items()))
        which = (
            f", for one id {entry} on rank {_listed(sorted(on))}" if identified else f" (rank {_listed(sorted(on))})"
        )
        # Equal contents may be chance; where most are equal, every rank reads the same.
        many = identified or 2 * len(twice) >= len(where)
        (faults if many else told).append(f"{len(twice)} of {len(where)} examples are on more than one rank{which}")
    weights = [share.numbers.get("weight") for share in shares]
    known = [float(weight) for weight in weights if isinstance(weight, (int, float))]
    total = f"W = {sum(known):g} ({_listed(weights)})" if len(known) == len(weights) else "W is not known"
    numbers = {"weights": weights, "scales": scales, "examples_on_several_ranks": len(twice)}
    seen = "; ".join([f"{len(shares)} ranks, each with its own share; {total}", *told, *faults])
    if faults:
        return Row(
            "replicas",
            "fail",
            seen,
            "build the model from the same seed or checkpoint on every rank; a DistributedSampler (with set_epoch) "
            "gives each rank its own examples",
            numbers,
        )
    return Row("replicas", "note" if told else "pass", seen, "", numbers)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
