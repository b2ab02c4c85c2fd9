"""Who else contributes to an update: D replicas, and the R ranks a backend averages gradients over.

This is the seam between the engine and the distributed world. One process is D = R = 1; other backends are classes
with the same members. The engine calls them at fixed moments, on every rank in the same order:

==================  ===========================================================================================
``degree``          D, the replicas: each sees other examples
``averaging``       R, the ranks whose gradients the backend averages (1 where it sums)
``open``            before a group whose weights are known: local W of each term -> W over all replicas
``hold`` / ``free`` around each micro-batch of a group, forward included: ``hold(last)`` keeps gradients local on all
                    but the last, ``free`` puts back what was
``nothing``         a micro-batch of weight 0: no backward runs, yet a reducer may have to be fed
``total``           after the last contribution: W that was counted along, over all replicas
``norm``            local norms of the gradients -> their norm over shards and replicas
``agree``           one rank's non-finite flag -> every rank's
==================  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import PolicyError, UnsupportedError


class Replicas:
    """One process: one replica, nothing to exchange. The base class of every other backend."""

    degree: int = 1
    averaging: int = 1
    backend: str = "one process"
    local: bool = True
    """Whether nothing is exchanged, so that the host may decide by itself."""

    def open(self, weights: Sequence[float]) -> tuple[float, ...]:
        return tuple(weights)

    def hold(self, model: nn.Module | None, last: bool) -> None:
        """Called before each micro-batch's forward."""

    def free(self, model: nn.Module | None) -> None:
        """Called after each micro-batch's backward, and when a group is left in any other way."""

    def nothing(self, losses: Sequence[Tensor]) -> None:
        """Called instead of backward for a micro-batch of weight 0."""

    def total(self, weights: Sequence[float | Tensor]) -> tuple[float | Tensor, ...]:
        return tuple(weights)

    def norm(self, norms: Tensor) -> Tensor:
        total: Tensor = torch.linalg.vector_norm(norms, 2.0)
        return total

    def agree(self, found_inf: Tensor) -> Tensor:
        return found_inf

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return {"D": self.degree, "R": self.averaging, "backend": self.backend}


def resolve(replicas: Any) -> Replicas:
    """``replicas`` as given to the manager -> the backend. None is one process."""
    if replicas is None or replicas == 1:
        return Replicas()
    if isinstance(replicas, Replicas):
        return replicas
    if isinstance(replicas, int):
        raise PolicyError(
            f"replicas={replicas}: a number says how many, not how to reach them", "leave it out for one process"
        )
    raise UnsupportedError(
        f"replicas={replicas!r} is of type {type(replicas).__name__}", "None for one process, or a Replicas backend"
    )
