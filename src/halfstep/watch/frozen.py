"""Parameters meant frozen that move all the same: weight decay and momentum also act on a gradient of zeros.

What is meant frozen shows in three ways: ``requires_grad`` is False, the script sets (part of) the gradient to zero
before each update, or no contribution has reached the parameter for many updates while its gradient of zeros is kept.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import FrozenMoved, Place
from halfstep.watch.gradients import Gradients
from halfstep.watch.hooked import Hooked
from halfstep.watch.look import Operation
from halfstep.watch.modules import Modules
from halfstep.watch.parameters import Parameters
from halfstep.watch.patches import Patches
from halfstep.watch.regions import ZEROING, Region, region
from halfstep.watch.samples import pick
from halfstep.watch.sources import freezes, only_line
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

Optimizer = torch.optim.Optimizer

_DENSE = 64  # attempts of which each is looked at, then every _SPARSE-th
_SPARSE = 16
_IDLE = 8  # attempts without a contribution after which a parameter counts as meant frozen
_SURE = 3  # attempts with a gradient zeroed by hand
_MOST = 16  # parameters looked at in an attempt


@dataclass(slots=True)
class _Masked:
    """A parameter whose gradient the script zeroes, wholly or in part, in every update."""

    parameter: weakref.ref[torch.Tensor]
    at: Place | None
    region: Region
    micro: int  # contributions begun when it was zeroed last
    attempts: int = 0
    changed: bool | torch.Tensor = False
    start: torch.Tensor | None = None
    zero: torch.Tensor | None = None


class Frozen:
    """A witness of attempts and a lens for gradients zeroed by hand."""

    def __init__(self, session: Session, parameters: Parameters, gradients: Gradients, modules: Modules) -> None:
        self._session = session
        self._parameters = parameters
        self._gradients = gradients
        self._modules = modules
        self._cleared: dict[int, int] = {}  # id(parameter) -> version of its gradient after zero_grad
        self._idle: dict[int, int] = {}  # id(parameter) -> attempts without a contribution
        self._times: dict[tuple[int, str], int] = {}  # how often suspects were compared
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # id(frozen) -> gradient at the last attempt
        self._suspects: list[tuple[torch.Tensor, torch.Tensor, str, torch.Tensor | None]] = []
        self._masked: dict[int, _Masked] = {}
        self._made: OrderedDict[int, tuple[Place | None, Region, int]] = OrderedDict()  # by address
        self._hooked = Hooked(session, modules)
        self._owners: dict[int, torch.Tensor] = {}
        self._owners_of = -1
        parameters.witnesses += [self, self._hooked]
        self._lens = _Lens(self)

    def install(self, patches: Patches) -> None:
        for owner in (Optimizer, torch.nn.Module):
            patches.around(owner, "zero_grad", None, self._after_clear)
        self._hooked.install(patches)
        if self._lens not in self._session.look.lenses:
            self._session.look.lenses.append(self._lens)

    def remove(self) -> None:
        self._hooked.remove()

    def _after_clear(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner = args[0]
        if isinstance(owner, Optimizer):
            parameters = [p for group in owner.param_groups for p in group["params"]]
        else:
            parameters = list(owner.parameters())
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None:
                self._cleared[id(parameter)] = grad._version
            elif self._cleared:
                self._cleared.pop(id(parameter), None)

    # -- around attempts -----------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, ident: int, number: int) -> None:
        self._suspects = []
        if number > _DENSE and number % _SPARSE:
            return
        micro = self._session.stream.micro
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or grad.is_sparse:
                    continue
                key = id(parameter)
                if not parameter.requires_grad:
                    self._suspect_frozen(parameter, grad)
                    continue
                if self._cleared and self._cleared.get(key) == grad._version:
                    idle = self._idle[key] = self._idle.get(key, 0) + 1
                    if idle >= _IDLE:
                        self._suspect(parameter, "no contribution")
                elif self._idle:
                    self._idle.pop(key, None)
                made = self._made.get(grad.data_ptr()) if self._made else None
                if made is not None and made[2] == micro:
                    self._zeroed(parameter, made[0], made[1])
                if self._masked and key in self._masked:
                    self._note(self._masked[key], parameter, grad, micro)

    def _suspect_frozen(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Frozen, unless a contribution of this very group reached it before ``requires_grad`` was set to False."""
        key, kept = id(parameter), self._kept.get(id(parameter))
        same = kept is not None and kept[0]() is grad and kept[1] == grad._version
        idle = self._cleared.get(key) == grad._version or same
        self._kept[key] = (weakref.ref(grad), grad._version)
        with torch.no_grad():
            untouched = None if idle else grad.abs().amax() == 0
        self._suspect(parameter, "requires_grad is False", untouched)

    def _suspect(self, parameter: torch.Tensor, why: str, only_if: torch.Tensor | None = None) -> None:
        if len(self._suspects) < _MOST:
            self._suspects.append((parameter, pick(parameter).clone(), why, only_if))

    def _note(self, masked: _Masked, parameter: torch.Tensor, grad: torch.Tensor, micro: int) -> None:
        if masked.micro != micro and self._session.look.is_open:
            masked.attempts, masked.start, masked.zero = 0, None, None  # not zeroed this time: no freezing
            return
        zero = pick(grad) == 0
        if masked.start is None or masked.zero is None:
            masked.start, masked.zero = pick(parameter).clone(), zero & pick(masked.region.inside(grad))
        else:
            masked.zero &= zero
        masked.attempts += 1

    def after(self, optimizer: Optimizer, ident: int, number: int) -> None:
        suspects, self._suspects = self._suspects, []
        for why in dict.fromkeys(w for _, _, w, _ in suspects):
            chosen = [(p, old, z) for p, old, w, z in suspects if w == why and p.device == suspects[0][0].device]
            if chosen:
                self._compare(ident, chosen, why)
        for key, masked in list(self._masked.items()):
            parameter = masked.parameter()
            if parameter is None:
                del self._masked[key]
            elif masked.attempts >= _SURE and masked.attempts & (masked.attempts + 1) == 0:
                self._compare_masked(ident, parameter, masked)

    def _compare(
        self, ident: int, chosen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], why: str
    ) -> None:
        idle = max([1, *(self._idle.get(id(p), 0) for p, _, _ in chosen)])
        times = self._times[(ident, why)] = self._times.get((ident, why), 0) + 1
        if times & (times - 1) and idle % _IDLE:
            return
        with torch.no_grad():
            moves = [((pick(p) - old).abs().amax().float(), only_if) for p, old, only_if in chosen if old.numel()]
            changes = torch.stack([move if only_if is None else move * only_if for move, only_if in moves])
        at = self._session.place()
        if why == "requires_grad is False":
            at = only_line(at, freezes)
        self._session.stream.emit(
            FrozenMoved,
            at=at,
            optimizer=ident,
            parameters=Late((changes > 0).sum(), int),
            why=why,
            name=self._modules.name(chosen[0][0]),
            updates=idle,
            change=Late(changes.amax()),
        )

    def _compare_masked(self, ident: int, parameter: torch.Tensor, masked: _Masked) -> None:
        if masked.start is None or masked.zero is None:
            return
        with torch.no_grad():
            change = ((pick(parameter) - masked.start).abs() * masked.zero).amax().float()
            if masked.changed is not False:
                change = torch.where(torch.as_tensor(masked.changed, device=change.device), 0.0, change)
        self._session.stream.emit(
            FrozenMoved,
            at=masked.at,
            optimizer=ident,
            parameters=Late((change > 0).float(), int),
            why="gradient zeroed by hand",
            name=self._modules.name(parameter),
            updates=masked.attempts,
            change=Late(change),
        )

    # -- zeroed by hand ------------------------------------------------------------------------------------------

    def saw(self, operation: Operation) -> None:
        if operation.name not in ZEROING or self._parameters.updating or self._gradients.busy:
            return
        zeroed = None if operation.backward else region(operation)
        if zeroed is None:
            return
        owner = None if operation.name == "zeros_like" else self._owner(operation.args[0])
        if operation.mutates and owner is not None:
            self._zeroed(owner, operation.at, zeroed)
        elif isinstance(operation.out, torch.Tensor) and (owner is not None or operation.name == "zeros_like"):
            self._made[operation.out.data_ptr()] = (operation.at, zeroed.kept(), self._session.stream.micro)
            while len(self._made) > 2 * _MOST:
                self._made.popitem(last=False)

    def _zeroed(self, parameter: torch.Tensor, at: Place | None, zeroed: Region) -> None:
        micro = self._session.stream.micro
        known = self._masked.get(id(parameter))
        if known is None or known.parameter() is not parameter:
            if len(self._masked) < _MOST:
                self._masked[id(parameter)] = _Masked(weakref.ref(parameter), at, zeroed.kept(), micro)
            return
        known.micro = micro
        differs = known.region.differs(zeroed)
        if isinstance(differs, torch.Tensor) and isinstance(known.changed, torch.Tensor):
            known.changed = known.changed | differs
        elif known.changed is not True and differs is not False:
            known.changed = differs

    def _owner(self, grad: Any) -> torch.Tensor | None:
        """The parameter in whose gradient's storage this tensor lies."""
        if not isinstance(grad, torch.Tensor) or grad.is_sparse:
            return None
        micro = self._session.stream.micro
        if self._owners_of != micro:
            self._owners_of = micro
            self._owners = {
                p.grad.untyped_storage().data_ptr(): p
                for _, optimizer in self._session.ledger.optimizers()
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None and p.grad.layout == torch.strided and type(p.grad) is torch.Tensor
            }
        return self._owners.get(grad.untyped_storage().data_ptr())


class _Lens:
    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        self._frozen.saw(operation)
