"""Half-precision gradients that no optimizer owns: those of a model whose FP32 copy is what is updated.

Their contributions add up in the model all the same, until the script takes them out.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import HalfSums, Place
from halfstep.watch.autocasts import HALF, name_of
from halfstep.watch.modules import Modules
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_FEWEST = 8  # contributions in one sum worth telling
_MODULES = 64


@dataclass(slots=True)
class _Sum:
    """The gradient of one half-precision parameter, as a sample of its model's."""

    parameter: weakref.ref[torch.Tensor]
    tensors: int
    gradient: weakref.ref[torch.Tensor] | None = None
    version: int = -1
    contributions: int = 0
    at: Place | None = None


class LooseGradients:
    def __init__(self, session: Session, modules: Modules) -> None:
        self._session = session
        self._modules = modules
        self._known: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._sums: list[_Sum] = []

    def install(self, patches: Patches) -> None:
        if self._entered not in self._modules.entries:
            self._modules.entries.append(self._entered)
        patches.around(torch.autograd, "backward", None, self._after)

    def remove(self) -> None:
        for held in self._sums:
            self._tell(held)

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any, at: Place | None) -> None:
        known = self._known.get(id(module))
        if (known is not None and known() is module) or len(self._sums) >= _MODULES:
            return
        self._known[id(module)] = weakref.ref(module)
        halves = [p for p in module.parameters() if p.dtype in HALF and p.requires_grad]
        if halves:
            self._sums.append(_Sum(weakref.ref(halves[0]), len(halves)))

    def _after(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for held in self._sums:
            parameter = held.parameter()
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                continue
            known = held.gradient() if held.gradient is not None else None
            if known is not gradient:
                self._tell(held)
                held.gradient, held.contributions = weakref.ref(gradient), 1
            elif gradient._version > held.version:
                held.contributions += 1
            held.version = gradient._version
            held.at = self._session.place() if held.contributions >= _FEWEST else None

    def _tell(self, held: _Sum) -> None:
        parameter, held_at, contributions = held.parameter(), held.at, held.contributions
        held.contributions = 0
        if parameter is None or contributions < _FEWEST:
            return
        owned = any(
            p is parameter
            for _, optimizer in self._session.ledger.optimizers()
            for group in optimizer.param_groups
            for p in group["params"]
        )
        if not owned:
            self._session.stream.emit(
                HalfSums,
                at=held_at,
                dtype=name_of(parameter.dtype),
                parameters=held.tensors,
                contributions=contributions,
            )
