"""Notices what was done by hand between the manager's verbs: gradients cleared, added to or used.

One small parameter stands for all others of its optimizer: whatever clears, adds to, clips or edits gradients by hand
does it there too. A hook on it counts additions; the gradient's version counts everything written in place. Nothing is
read from a device while all is well. A fault is raised at the next ``backward`` or ``step``, before anything changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep.errors import counted

CLEARED = "leave zero_grad() out: manager.step(model, optimizer) makes the update and clears the gradients after it"


class Witness:
    """The parameter that stands for all others of one optimizer."""

    def __init__(self, parameter: Tensor) -> None:
        count = self._count = [0]  # additions to the gradient, by whomever
        self._parameter = weakref.ref(parameter)
        self._handle = parameter.register_post_accumulate_grad_hook(lambda _: _increment(count))  # type: ignore[no-untyped-call]
        self._known = 0
        self._gradient: Tensor | None = None
        self._version = -1
        self.ids = frozenset((id(parameter),))
        self.edited = False
        """Whether contributions were changed in place by hand since the last update."""
        self.sync()

    @property
    def parameter(self) -> Tensor | None:
        return self._parameter()

    def remove(self) -> None:
        self._handle.remove()

    def look(self, waits: Callable[[frozenset[int]], bool]) -> tuple[str, str] | None:
        """What happened since the last ``sync``, if it should not have. ``waits``: do contributions, in there?"""
        parameter = self._parameter()
        if parameter is None:
            return None
        gradient = parameter.grad
        same = gradient is self._gradient and self._count[0] == self._known
        if same and (gradient is None or gradient._version == self._version):
            return None
        pending = waits(self.ids)
        added = self._count[0] - self._known
        if added and (pending or gradient is not None):
            return (
                f"{added} backward pass{'es' * (added > 1)} ran without the manager and added to the gradients"
                + (" of this group" if pending else " before the group's first contribution"),
                "manager.backward(loss) for every contribution (it scales and normalises them); for gradients that are "
                "not a contribution, torch.autograd.grad",
            )
        fault = None
        if pending and self._gradient is not None:
            if gradient is None:
                fault = "the gradients were cleared while contributions were pending: what was contributed is lost"
            elif gradient is not self._gradient:
                fault = "the gradients were replaced while contributions were pending: what was contributed is lost"
            elif not bool(gradient.any()):
                fault = "the gradients were set to zero while contributions were pending: what was contributed is lost"
            else:
                self.edited = True
        self.sync()
        return None if fault is None else (fault, CLEARED)

    def sync(self) -> None:
        """Take what there is now as known: after the manager's own backward or update."""
        parameter = self._parameter()
        if parameter is not None:
            self._known = self._count[0]
            gradient = self._gradient = parameter.grad
            self._version = -1 if gradient is None else gradient._version


class Witnesses:
    """The witnesses of one manager, one for each optimizer it steps (before the first update: one for all)."""

    def __init__(self) -> None:
        self._all: list[Witness] = []
        self._handle: Any = None
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.fault: tuple[str, str] | None = None

    def __bool__(self) -> bool:
        return bool(self._all)

    def before(self, waits: Callable[[frozenset[int]], bool]) -> None:
        """Look, before a backward or an update. ``waits(ids)``: whether contributions wait on these parameters."""
        if self.fault is None:
            if self._handle is not None:
                self._early(waits)
            for witness in self._all:
                self.fault = self.fault or witness.look(waits)

    def _early(self, waits: Callable[[frozenset[int]], bool]) -> None:
        """Keep a fault where, before the manager's first update, contributions were stepped by hand."""
        for optimizer in list(self._stepped):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(witness.ids <= held and waits(witness.ids) for witness in self._all):
                self.stepped(1, type(optimizer).__name__)

    def after(self) -> None:
        """The manager's own backward or update has run."""
        for witness in self._all:
            witness.sync()

    def edited(self, ids: frozenset[int]) -> bool:
        """Whether gradients of these parameters were changed in place by hand since the last update."""
        return any(witness.edited and witness.ids <= ids for witness in self._all)

    def first(self, leaves: Iterable[Tensor]) -> None:
        """Before any optimizer is known: one of the parameters that the first backward reached.

        Whatever optimizer is stepped until the manager's own first update is remembered, should it be that one.
        """
        having = [leaf for leaf in leaves if leaf.grad is not None]
        parameters: list[Tensor] = [leaf for leaf in having if isinstance(leaf, nn.Parameter)]
        self._add(parameters or having)
        if self._handle is None:
            stepped = self._stepped
            self._handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.add(optimizer))
            weakref.finalize(self, self._handle.remove)

    def require_unstepped(self, optimizers: Iterable[torch.optim.Optimizer], pending: int) -> None:
        """Keep a fault where one of these was stepped by hand before the manager knew it."""
        for optimizer in optimizers:
            if optimizer in self._stepped:
                self.stepped(pending, type(optimizer).__name__)

    def keep(self, parameters: list[Tensor], ids: frozenset[int], known: list[frozenset[int]]) -> None:
        """After an update: one for these parameters, none for parameters that no optimizer steps any more."""
        if len(known) == 1 and len(self._all) == 1 and self._handle is None and self._all[0].ids <= ids:
            self._all[0].edited = False
            self._all[0].sync()
            return
        alive = []
        for witness in self._all:
            witness.edited &= not witness.ids <= ids
            if any(witness.ids <= of for of in known) and witness.parameter is not None:
                alive.append(witness)
            else:
                witness.remove()
        self._all = alive
        if not any(witness.ids <= ids for witness in alive):
            self._add([p for p in parameters if p.requires_grad])
        self._forget_first()
        self.after()

    def stepped(self, pending: int, optimizer: str) -> None:
        """An optimizer was stepped by hand."""
        if pending and self.fault is None:
            self.fault = (
                f"{optimizer}.step() was called by hand while {counted(pending, 'contribution')} "
                f"{'was' if pending == 1 else 'were'} pending: parameters changed inside a group, by gradients that "
                "still carry what manager.step would divide by",
                "manager.step(model, optimizer) instead: it unscales, clips, steps and clears the gradients",
            )

    def clear(self) -> None:
        """Forget what was seen: gradients were cleared on purpose."""
        self.fault = None
        self._stepped.clear()
        for witness in self._all:
            witness.edited = False
        self.after()

    def _forget_first(self) -> None:
        self._stepped.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _add(self, candidates: list[Tensor]) -> None:
        usable = [c for c in candidates if c.layout == torch.strided and type(c.data) is Tensor and c.is_leaf]
        if usable:
            self._all.append(Witness(min(usable, key=lambda c: c.numel())))


def _increment(count: list[int]) -> None:
    count[0] += 1
