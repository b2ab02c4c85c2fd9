"""Parameters: which storage is whose, whether an optimizer is at them now, and what the script writes to them itself.

Version counters tell that a parameter changed outside an update, but neither where nor how, and not at all when it was
written through ``.data``; while operators are looked at, each such write is seen with its line.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.events import ParametersChanged, Place
from halfstep.watch.gradients import Gradients
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches, uncompiled
from halfstep.watch.perthread import PerThread
from halfstep.watch.stream import Draft

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_BOOKKEEPING = {"set_", "resize_", "detach_", "requires_grad_"}


class Witness(Protocol):
    """Looks at parameters around each attempt. ``number``: the attempt's, counted for this optimizer."""

    def before(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None: ...

    def after(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None: ...


class Parameters:
    """Knows the optimizers' parameters by storage; calls its witnesses around every attempt."""

    def __init__(self, session: Session, gradients: Gradients) -> None:
        self._session = session
        gradients.parameters = self
        self.witnesses: list[Witness] = []
        self._attempts: dict[int, int] = {}
        self._handles: list[Any] = []
        self._owners: dict[int, tuple[int, int]] = {}  # address -> (optimizer, elements)
        self._stale = True
        self._writes: dict[tuple[Place | None, int], tuple[Draft, set[int]]] = {}  # since the last known call

    _running: PerThread[list[tuple[weakref.ref[torch.optim.Optimizer], int, int]]] = PerThread(list)

    def install(self, patches: Patches) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        patches.around(torch.autograd, "backward", self._before_backward)
        if self not in self._session.look.lenses:
            self._session.look.lenses.append(self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- attempts ------------------------------------------------------------------------------------------------

    @property
    def updating(self) -> bool:
        """Whether an optimizer is inside its update now."""
        return bool(self._running)

    def running(self) -> list[int]:
        """The numbers of the optimizers inside their update now."""
        return [ident for _, ident, _ in self._running]

    @uncompiled
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._session.patches.live:
            return
        try:
            for place, (ref, _, _) in enumerate(self._running):
                if ref() in (None, optimizer):
                    del self._running[place:]  # its last attempt raised
                    break
            ident = self._session.ledger.ident(optimizer)
            number = self._attempts[ident] = self._attempts.get(ident, 0) + 1
            self._running.append((weakref.ref(optimizer), ident, number))
        except Exception as error:
            self._session.fault("before an attempt", error)
        else:
            self._tell("before", optimizer, ident, number)

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running or self._running[-1][0]() is not optimizer:
            return
        _, ident, number = self._running.pop()
        self._stale = True
        if self._session.patches.live:
            self._tell("after", optimizer, ident, number)

    def _tell(self, when: str, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        with self._session.patches.lock, self._session.look.silent():
            for witness in self.witnesses:
                try:
                    getattr(witness, when)(optimizer, ident, number)
                except Exception as error:
                    self._session.fault(f"{when} an attempt, {type(witness).__name__}", error)

    # -- storages ------------------------------------------------------------------------------------------------

    def owner(self, tensor: torch.Tensor) -> int | None:
        """The optimizer that owns the parameter whose whole storage this tensor shows; None for any other tensor."""
        if self._stale:
            self._stale = False
            self._owners = {
                p.data_ptr(): (ident, p.numel())
                for ident, optimizer in self._session.ledger.optimizers()
                for group in optimizer.param_groups
                for p in group["params"]
                if p.layout == torch.strided and type(p.data) is torch.Tensor
            }
            self._owners.pop(0, None)
        if tensor.layout != torch.strided:
            return None
        known = self._owners.get(tensor.data_ptr())
        return known[0] if known is not None and known[1] == tensor.numel() else None

    # -- writes by hand ------------------------------------------------------------------------------------------

    def _before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stale = True  # storages may have been exchanged since

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        if not operation.mutates or operation.backward or self._running or operation.name in _BOOKKEEPING:
            return
        for tensor in written(operation):
            ident = self.owner(tensor)
            if ident is not None:
                self._wrote(operation, ident, tensor.data_ptr())

    def _wrote(self, operation: Operation, ident: int, address: int) -> None:
        key = (operation.at, ident)
        draft, seen = self._writes.get(key, (None, set()))
        if draft is None or address in seen:
            draft = self._session.stream.emit(
                ParametersChanged, at=operation.at, optimizers={ident: 1}, operator=operation.name
            )
            seen = set()
        else:
            draft.fields["optimizers"][ident] += 1
        seen.add(address)
        self._writes[key] = (draft, seen)

    def flush(self) -> set[int]:
        """Optimizers whose parameters were seen to be written since the last call of this."""
        told = {ident for _, ident in self._writes}
        self._writes.clear()
        return told


def written(operation: Operation) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to, those in lists too."""
    for argument, value in zip(operation.func._schema.arguments, operation.args, strict=False):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor
    out = operation.kwargs.get("out")
    if isinstance(out, torch.Tensor):
        yield out
