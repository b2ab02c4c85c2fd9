"""Parameters with a gradient hook of the script's: what arrives at the hook beside what it leaves.

Elements that the hook zeroes in every update are meant frozen; decay and momentum move them all the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import FrozenMoved, Place
from halfstep.watch.modules import Modules
from halfstep.watch.patches import Patches
from halfstep.watch.place import by_engine
from halfstep.watch.samples import pick
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_MOST = 16  # parameters looked at
_ATTEMPTS = 64  # of each
_SURE = 3  # attempts in which an element was zeroed


@dataclass(slots=True)
class _Hooked:
    parameter: weakref.ref[torch.Tensor]
    at: Place | None
    handle: Any = None
    attempts: int = 0
    arrived: torch.Tensor | None = None  # elements whose gradient came in since the last attempt, not zero
    old: torch.Tensor | None = None
    zeroed: torch.Tensor | None = None  # how often each element's gradient was zeroed
    passed: torch.Tensor | None = None  # whether it ever came through
    moved: torch.Tensor | None = None  # the largest change of each element in one attempt


class Hooked:
    """A witness of attempts. Its own hook is registered right before the script's first one, and sees the same."""

    def __init__(self, session: Session, modules: Modules) -> None:
        self._session = session
        self._modules = modules
        self._known: dict[int, _Hooked] = {}
        self._register: Any = torch.Tensor.register_hook

    def install(self, patches: Patches) -> None:
        self._register = torch.Tensor.register_hook  # as it is unobserved
        for name in _HOOKS:
            patches.around(torch.Tensor, name, self._before_hook)

    def remove(self) -> None:
        for hooked in self._known.values():
            hooked.handle.remove()
        self._known.clear()

    def _before_hook(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0]
        known = self._known.get(id(tensor))
        if known is not None and known.parameter() is None:
            del self._known[id(tensor)]
            known = None
        if known is not None or len(self._known) >= _MOST or not isinstance(tensor, torch.nn.Parameter):
            return
        if not tensor.requires_grad or tensor.layout is not torch.strided or hasattr(tensor, "placements"):
            return
        if by_engine():
            return  # its hooks only count, or belong to a backward that adds nothing
        hooked = _Hooked(weakref.ref(tensor), self._session.place())

        def arrives(grad: torch.Tensor) -> None:
            if self._session.patches.live:
                self._session.patches.observe("gradient of a hooked parameter", _arrived, hooked, grad)

        hooked.handle = self._register(tensor, arrives)
        self._known[id(tensor)] = hooked

    # -- around attempts -----------------------------------------------------------------------------------------

    def before(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        for hooked, parameter in self._of(optimizer):
            grad, arrived = parameter.grad, hooked.arrived
            hooked.arrived = hooked.old = None
            if grad is None or arrived is None or grad.layout is not torch.strided:
                continue
            with torch.no_grad():
                value, left = pick(parameter), pick(grad) != 0
                if hooked.zeroed is None or hooked.passed is None:
                    hooked.zeroed, hooked.passed = torch.zeros_like(left, dtype=torch.uint8), torch.zeros_like(left)
                    hooked.moved = torch.zeros_like(value)
                hooked.zeroed += arrived & ~left
                hooked.passed |= left
                hooked.old = value.clone()

    def after(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        for key, hooked in list(self._known.items()):
            if hooked.parameter() is None:
                del self._known[key]
        for hooked, parameter in self._of(optimizer):
            if hooked.old is None or hooked.moved is None:
                continue
            with torch.no_grad():
                hooked.moved = torch.maximum(hooked.moved, (pick(parameter) - hooked.old).abs())
            hooked.old = None
            hooked.attempts += 1
            if hooked.attempts >= _SURE and hooked.attempts & (hooked.attempts + 1) == 0:
                self._compare(ident, parameter, hooked)
            if hooked.attempts >= _ATTEMPTS:
                hooked.handle.remove()

    def _of(self, optimizer: torch.optim.Optimizer) -> list[tuple[_Hooked, torch.Tensor]]:
        if not self._known:
            return []
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs = [(h, h.parameter()) for key, h in self._known.items() if key in owned and h.attempts < _ATTEMPTS]
        return [(h, p) for h, p in pairs if p is not None]

    def _compare(self, ident: int, parameter: torch.Tensor, hooked: _Hooked) -> None:
        if hooked.zeroed is None or hooked.passed is None or hooked.moved is None:
            return
        with torch.no_grad():
            sure = (hooked.zeroed >= _SURE) & ~hooked.passed
            changes = (hooked.zeroed > 0) & hooked.passed  # another mask each time: nothing is meant frozen
            change = torch.where(changes.any(), 0.0, (hooked.moved * sure).amax().float())
        self._session.stream.emit(
            FrozenMoved,
            at=hooked.at,
            optimizer=ident,
            parameters=Late((change > 0).float(), int),
            why="gradient zeroed by hand",
            name=self._modules.name(parameter),
            updates=hooked.attempts,
            change=Late(change),
        )


def _arrived(hooked: _Hooked, grad: torch.Tensor) -> None:
    if hooked.attempts >= _ATTEMPTS or grad.layout is not torch.strided:
        return
    with torch.no_grad():
        some = pick(grad)
        some = (some != 0) & torch.isfinite(some)
        hooked.arrived = some if hooked.arrived is None else hooked.arrived | some
