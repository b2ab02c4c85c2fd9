"""Notices what was done by hand between the manager's verbs: gradients cleared, added to or used.

One small parameter stands for all: every backward of a group adds to it once, nothing else touches its gradient. A
hook on it counts additions; the gradient's version counts everything written in place. Nothing is read from a device
while all is well. A fault is kept and raised at the next ``step``, before anything changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Witness:
    """The parameter that stands for all others of one manager."""

    def __init__(self) -> None:
        self._parameter: weakref.ref[Tensor] | None = None
        self._handle: Any = None
        self._count = [0]  # additions to the gradient, by whomever
        self._known = 0
        self._gradient: Tensor | None = None
        self._version = 0
        self._value: Tensor | None = None
        self.fault: tuple[str, str] | None = None
        self.edits = 0

    def choose(self, candidates: Iterable[Tensor], *, remember: bool = False) -> None:
        """Take the smallest of these parameters. ``remember``: keep its value, to see whether it changes."""
        best: Tensor | None = None
        for parameter in candidates:
            usable = parameter.requires_grad and not parameter.is_sparse and type(parameter.data) is Tensor
            if usable and (best is None or parameter.numel() < best.numel()):
                best = parameter
        self.drop()
        if best is None:
            return
        count = self._count = [0]
        self._parameter = weakref.ref(best)
        self._handle = best.register_post_accumulate_grad_hook(lambda _: _increment(count))
        self._known = 0
        self._remember(best.grad)
        if remember:
            self._value = best.detach().clone()

    def clear(self) -> None:
        """Forget what was seen: gradients were cleared on purpose."""
        self.fault = None
        self.after()

    def drop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._parameter = self._value = self._gradient = None

    @property
    def chosen(self) -> bool:
        return self._parameter is not None and self._parameter() is not None

    def before(self, pending: bool) -> None:
        """Look, before a backward or an update. ``pending``: contributions wait in the gradients."""
        if self._parameter is None or self.fault is not None:
            return
        parameter = self._parameter()
        if parameter is None:
            return
        gradient = parameter.grad
        if gradient is self._gradient and self._count[0] == self._known:
            if gradient is None or gradient._version == self._version:
                return
        if self._count[0] != self._known:
            added = self._count[0] - self._known
            self.blame(
                f"{added} backward pass{'es' * (added > 1)} ran without the manager and added to the gradients"
                + (" of this group" if pending else " before the group's first contribution"),
                "manager.backward(loss) for every contribution (it scales and normalises them); for gradients that "
                "are not a contribution, torch.autograd.grad",
            )
        elif pending and (gradient is None or (gradient is not self._gradient and self._gradient is not None)):
            self.blame(
                "the gradients were cleared while contributions were pending: what was contributed before is lost",
                "leave zero_grad() out: manager.step clears the gradients after every update",
            )
        elif pending and gradient is not None and self._gradient is not None:
            if not bool(gradient.any()):
                self.blame(
                    "the gradients were set to zero while contributions were pending: what was contributed is lost",
                    "leave zero_grad() out: manager.step clears the gradients after every update",
                )
            else:
                self.edits += 1
                self._version = gradient._version
        else:
            self._remember(gradient)

    def after(self) -> None:
        """Look again, after the manager's own backward or update."""
        parameter = None if self._parameter is None else self._parameter()
        if parameter is not None:
            self._known = self._count[0]
            self._remember(parameter.grad)

    def choose_among(self, binding: Any) -> None:
        """After an update: keep the witness, or take another where it is not of this model."""
        parameter = None if self._parameter is None else self._parameter()
        self._value = None
        if parameter is None:
            return
        self.after()

    def moved(self) -> bool:
        """Whether the remembered parameter has another value now; forgets it."""
        parameter = None if self._parameter is None else self._parameter()
        value, self._value = self._value, None
        return parameter is not None and value is not None and not torch.equal(parameter.detach(), value)

    def stepped(self, pending: int, optimizer: str) -> None:
        """An optimizer was stepped by hand."""
        if pending and self.fault is None:
            self.blame(
                f"{optimizer}.step() was called by hand while {pending} contributions were pending: parameters changed "
                "inside a group, by gradients that still carry what manager.step would divide by",
                "manager.step(model, optimizer) instead: it unscales, clips and steps",
            )

    def blame(self, seen: str, fix: str) -> None:
        self.fault = (seen, fix)

    def _remember(self, gradient: Tensor | None) -> None:
        self._gradient = gradient
        self._version = -1 if gradient is None else gradient._version


def _increment(count: list[int]) -> None:
    count[0] += 1


def smallest_with_gradient(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that hold a gradient: candidates every contribution so far has reached."""
    return [p for p in parameters if p.grad is not None]
