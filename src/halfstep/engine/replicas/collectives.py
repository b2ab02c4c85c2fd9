"""The few collectives of the engine: small rows that every replica shows every other, and gradients averaged by hand.

A *link* is a process group. Replicas are reached over one link, or over several in turn (a mesh of replicated and
sharded dimensions): gathering over each gives the rows of all.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import HalfstepError, ReplicaLostError, UnsupportedError

BUCKET = 25 << 20  # bytes of gradients exchanged at once, as DistributedDataParallel does
Link = Any  # a ProcessGroup; its class is absent where torch was built without distributed


def initialised() -> bool:
    """Whether this process is one of a process group."""
    return dist.is_available() and dist.is_initialized()


def world() -> int:
    return dist.get_world_size() if initialised() else 1


def rank() -> int:
    return dist.get_rank() if initialised() else 0


def members(link: Link) -> tuple[int, ...]:
    """Global ranks of a link."""
    return tuple(dist.get_process_group_ranks(link))


def device_of(link: Link) -> torch.device:
    """Where small rows travel: the host where the backend can (nothing is waited for then), else the accelerator."""
    kinds = {device.type for device in link._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def gather(row: Sequence[int], links: Sequence[Link]) -> list[list[int]]:
    """One row of 64-bit integers a member, the same length on each -> the rows of all, in the order of their ranks."""
    rows = torch.tensor([list(row)], dtype=torch.int64)
    for link in links:
        own = rows.to(device_of(link))
        out = [torch.empty_like(own) for _ in range(dist.get_world_size(link))]
        dist.all_gather(out, own, group=link)
        rows = torch.cat(out).cpu()
    return rows.tolist()


_LOST = re.compile(r"/gloo/|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE)
_OWN = re.compile(r"unhandled (cuda|system) error|out of memory|invalid (argument|usage)|internal error", re.IGNORECASE)


def lost(error: BaseException, what: str) -> ReplicaLostError | None:
    """What an exception of a collective says of the other ranks; None where it is of another kind, or this rank's own.

    Gloo raises plain RuntimeErrors: its words have to do. ``what``: what was being exchanged.
    """
    if isinstance(error, HalfstepError) or not isinstance(error, RuntimeError):
        return None
    if _OWN.search(str(error)) or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
        return None
    first = str(error).strip().splitlines()[0]
    return ReplicaLostError(
        f"rank {rank()} of {world()} was left alone while {what} were exchanged: another rank has ended, or did not "
        f"come within the process group's timeout ({first})",
        "the cause stands in the output of the rank that ended first; the journal holds every update before this one. "
        "Start all ranks again from the last checkpoint (torchrun does with --max-restarts); if a rank is only slow, "
        "init_process_group(timeout=…)",
    )


@contextmanager
def answered(what: str, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Other ranks have to take part in this: where one does not, ``before`` is called, and ReplicaLostError raised."""
    try:
        yield
    except RuntimeError as error:
        told = lost(error, what)
        if told is None:
            raise
        with suppress(Exception):
            before()
        raise told from error


def bits(value: float) -> int:
    """A float as the integer with its bits: rows hold both."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def number(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])


@torch.no_grad()
def average(parameters: Sequence[Tensor], links: Sequence[Link]) -> None:
    """Replace every gradient by its mean over the replicas: what a reducer does during the last backward.

    A parameter that has a gradient on some replica counts as zero on those where it has none; one without any keeps
    none. Averaging what is equal on all changes nothing, so parts that were exchanged before stay right.
    """
    replicas = math.prod(dist.get_world_size(link) for link in links)
    held = gather([int(p.grad is not None) for p in parameters], links)
    chosen = [p for p, column in zip(parameters, zip(*held, strict=True), strict=True) if any(column)]
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in chosen:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UnsupportedError(
                f"a sparse gradient of shape {tuple(parameter.shape)} has to be exchanged outside a backward",
                "dense gradients (nn.Embedding(sparse=False)), or groups in which every replica supervises something",
            )
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        kinds.setdefault((parameter.device, parameter.grad.dtype), []).append(plain(parameter.grad))
    for gradients in kinds.values():
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(replicas)
            for link in links:
                dist.all_reduce(flat, group=link)
            for gradient, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


def differ(parameters: Sequence[Tensor], links: Sequence[Link]) -> bool:
    """Whether replicas hold other parameters: told by their sums. A collective."""
    own = plain_sum(parameters)
    return len({tuple(row) for row in gather(own, links)}) > 1


@torch.no_grad()
def plain_sum(parameters: Sequence[Tensor]) -> list[int]:
    """Σ p and Σ |p| over all parameters, as bits."""
    values = [plain(p).double() for p in parameters if plain(p).numel()]
    return [bits(sum(float(v.sum()) for v in values)), bits(sum(float(v.abs().sum()) for v in values))]


def plain(tensor: Tensor) -> Tensor:
    """What this process itself stores of a distributed tensor; any other tensor as it is."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if size > room or not buckets:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(gradient)
        room -= size
    return buckets
