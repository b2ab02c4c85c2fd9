"""Norms of gradients of which each rank stores a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.engine.replicas.collectives import answered
from halfstep.errors import UnsupportedError


def whole_norms(norms: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Norms of what is stored here, one a parameter -> those of the whole gradients, the same on every rank.

    One collective for each mesh dimension that parameters are sharded over: squares are added up, so that a
    non-finite part anywhere is non-finite everywhere. A parameter that is replicated along a dimension counts once.
    """
    placed = [_placement(parameter) for parameter in parameters]
    dimensions = _dimensions(placed)
    if not dimensions:
        return norms
    squares = norms.double().square()
    # What is stored alike on several ranks of a dimension is shared out among them, so that sums count it once.
    for key, (link, size) in dimensions.items():
        shares = [1.0 if key in sharded else 1.0 / size for sharded in placed]
        squares = squares * torch.tensor(shares, dtype=squares.dtype, device=squares.device)
        with answered("norms"):
            dist.all_reduce(squares, group=link)
    return squares.sqrt().to(norms.dtype)


def dimensions_of(parameters: Sequence[Tensor]) -> dict[tuple[int, ...], tuple[Any, int]]:
    """The mesh dimensions that any of these parameters is sharded over: global ranks -> (process group, size).

    Raises where they lie on meshes that are no parts of one.
    """
    meshes = [mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None]
    whole = {mesh._get_root_mesh() for mesh in meshes}
    if len(whole) > 1:
        raise UnsupportedError(
            f"parameters of one model lie on {len(whole)} meshes that are no parts of one: {sorted(map(str, whole))}",
            'one init_device_mesh for the run, and parts of it (mesh["dp"], mesh["tp"]) for the model',
        )
    return _dimensions([_placement(p) for p in parameters])


def _placement(parameter: Tensor) -> dict[tuple[int, ...], tuple[Any, int]]:
    """The mesh dimensions a parameter is sharded over: global ranks -> (process group, size)."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return {}
    found = {}
    for dimension, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if "Shard" in type(placement).__name__:  # the strided one, of two dimensions on one, says it is none
            link = mesh.get_group(dimension)
            found[tuple(dist.get_process_group_ranks(link))] = (link, mesh.size(dimension))
        elif not placement.is_replicate():
            raise UnsupportedError(
                f"a parameter of shape {tuple(parameter.shape)} is placed {placement} on its mesh",
                "shard or replicate parameters",
            )
    return found


def _dimensions(placed: Sequence[dict[tuple[int, ...], tuple[Any, int]]]) -> dict[tuple[int, ...], tuple[Any, int]]:
    """All mesh dimensions that something is sharded over, in one order on all ranks."""
    found: dict[tuple[int, ...], tuple[Any, int]] = {}
    for dimensions in placed:
        found |= dimensions
    return found
