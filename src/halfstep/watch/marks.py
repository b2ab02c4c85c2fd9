"""Marks of parameters: two numbers that tell one rank's from another's, taken at a few updates, compared afterwards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from halfstep.events import ParametersMarked
from halfstep.watch.parameters import Parameters
from halfstep.watch.patches import Patches
from halfstep.watch.replicas import Replicas
from halfstep.watch.stream import Late, norms_of

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_BASE = 4096  # numbers in the fixed vector that parameters are projected on
_DENSE = 4  # updates marked each, then powers of two


class Marks:
    """A witness of attempts."""

    def __init__(self, session: Session, replicas: Replicas, parameters: Parameters) -> None:
        self._session = session
        self._replicas = replicas
        self._parameters = parameters
        self._vectors: dict[torch.device, torch.Tensor] = {}
        parameters.witnesses.append(self)

    def install(self, patches: Patches) -> None:
        pass

    def before(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        if number == 1:
            self._mark(optimizer, ident, 0)

    def after(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        if number <= _DENSE or number & (number - 1) == 0:
            self._mark(optimizer, ident, number)

    def _mark(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        if not self._replicas.together or len(self._parameters.running()) > (number == 0):
            return  # an optimizer inside another holds a part of the parameters
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(_is_whole(p) for p in parameters) or len({p.device for p in parameters}) != 1:
            return
        with torch.no_grad():
            vector = self._vector(parameters[0].device)
            mark = torch.stack([_projected(p, vector) * math.cos(i) for i, p in enumerate(parameters)]).sum()
            norm = torch.linalg.vector_norm(norms_of(parameters))
        self._session.stream.emit(
            ParametersMarked, optimizer=ident, update=number, mark=Late(mark), norm=Late(norm), at=self._session.place()
        )

    def _vector(self, device: torch.device) -> torch.Tensor:
        vector = self._vectors.get(device)
        if vector is None:
            # The script's own random numbers stay as they are.
            generator = torch.Generator().manual_seed(1)
            vector = self._vectors[device] = torch.randn(_BASE, generator=generator).to(device)
        return vector


def _projected(parameter: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """The parameter's product with a fixed vector, made of the short one: deterministic, one pass."""
    flat = parameter.detach().reshape(-1).float()
    total = torch.zeros((), device=flat.device)
    while flat.numel() > _BASE:
        rows = flat.numel() // _BASE
        rest = flat[rows * _BASE :]
        total = total + rest @ vector[: rest.numel()]
        flat = flat[: rows * _BASE].view(rows, _BASE) @ vector
    return total + flat @ vector[: flat.numel()]


def _is_whole(parameter: torch.Tensor) -> bool:
    """Not sharded: every replica holds all of it."""
    return (
        type(parameter) in (torch.Tensor, torch.nn.Parameter)
        and parameter.layout is torch.strided
        and parameter.is_floating_point()
        and not hasattr(parameter, "_is_flat_param")
    )
