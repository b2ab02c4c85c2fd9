"""The (model, optimizers) pairs one manager steps, and whose gradients are whose."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from halfstep.engine.binding import Binding, Optimizer, modules_of, optimizers_of
from halfstep.engine.ledger import Contribution, Share
from halfstep.errors import ForeignGradients

_IDLE = 256  # attempts after which a pair that is no longer stepped is let go


class Bindings:
    """Finds the binding of a ``step`` call, and refuses gradients that belong to another optimizer.

    ``by_hand`` is called with an optimizer that was stepped by somebody else.
    """

    def __init__(self, by_hand: Callable[[str], None]) -> None:
        self._by_key: dict[tuple[int, ...], Binding] = {}
        self._used: dict[tuple[int, ...], int] = {}
        self._hooks: dict[int, tuple[weakref.ref[Optimizer], Any]] = {}
        self._strays: set[int] = set()
        self._by_hand = by_hand
        self.stepping = False
        """Whether the manager itself is stepping an optimizer now."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Any:
        return iter(self._by_key.values())

    def find(self, model: Any, optimizer: Any) -> Binding:
        """The binding of this pair; built and checked the first time and after parameter groups changed."""
        key: tuple[int, ...] = (id(model), id(optimizer))
        binding = self._by_key.get(key)
        if binding is None and not isinstance(model, (list, tuple)) and not isinstance(optimizer, (list, tuple)):
            return Binding(modules_of(model), optimizers_of(optimizer), key)
        if binding is None:
            modules, optimizers = modules_of(model), optimizers_of(optimizer)
            key = (*map(id, modules), 0, *map(id, optimizers))
            binding = self._by_key.get(key)
            if binding is None:
                return Binding(modules, optimizers, key)
        if not binding.current():
            return Binding(binding.modules, binding.optimizers, key)
        binding.notice_load()
        return binding

    def keep(self, binding: Binding) -> None:
        """Keep a binding that has passed every check."""
        if self._by_key.get(binding.key) is binding:
            return
        self._by_key[binding.key] = binding
        for optimizer in binding.optimizers:
            known = self._hooks.get(id(optimizer))
            if known is None or known[0]() is not optimizer:
                handle = optimizer.register_step_post_hook(_hook(weakref.ref(self)))
                self._hooks[id(optimizer)] = (weakref.ref(optimizer), handle)

    def notice(self, optimizer: Optimizer) -> None:
        """An optimizer has been stepped, by whomever."""
        if not self.stepping:
            self._by_hand(type(optimizer).__name__)

    def require_own(self, binding: Binding, share: Share, pending: list[Contribution]) -> None:
        """Raise :class:`ForeignGradients` where a loss of another optimizer left gradients that would be used.

        Either on parameters of another optimizer (this step's contributions reached them), or on these parameters
        (a contribution that was used before reached them, and nothing cleared it).
        """
        if self._strays:
            reaching: dict[int, int] = {}
            for contribution in share.contributions:
                for key in contribution.leaves or contribution.only or ():
                    reaching[key] = reaching.get(key, 0) + (not contribution.empty)
            left = [
                parameter
                for parameter in binding.parameters
                if id(parameter) in self._strays
                and parameter.grad is not None
                and parameter.grad._version > reaching.get(id(parameter), len(share)) - 1
            ]
            if left:
                raise ForeignGradients(*_message(binding, left, "were left there by the loss of another optimizer"))
        others = [other for other in self._by_key.values() if other.key != binding.key]
        if not others:
            return
        own = {id(c) for c in share.contributions}
        rest = [c for c in pending if id(c) not in own]
        for other in others:
            foreign = [
                p
                for p in other.parameters
                if p.grad is not None and id(p) not in binding.ids and _is_foreign(p, share.contributions, rest)
            ]
            if foreign:
                raise ForeignGradients(*_message(other, foreign, "came from the loss that is about to be stepped"))

    def settle(self, binding: Binding, share: Share, number: int) -> None:
        """After an attempt: remember whom its contributions reached besides, let go of what is long unused."""
        self._strays -= binding.ids
        for contribution in share.contributions:
            if contribution.only is None and contribution.leaves is not None:
                self._strays |= contribution.leaves - binding.ids
        if len(self._by_key) > 1:
            self._used[binding.key] = number
            for key in [k for k in self._by_key if self._used.setdefault(k, number) + _IDLE < number]:
                del self._by_key[key], self._used[key]

    def clear(self) -> None:
        """Clear the gradients of every parameter known."""
        for binding in self._by_key.values():
            binding.clear()
        self._strays.clear()


def _hook(bindings: weakref.ref[Bindings]) -> Callable[..., None]:
    """What an optimizer calls after each step. It keeps no manager alive."""

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        alive = bindings()
        if alive is not None:
            alive.notice(optimizer)

    return stepped


def _is_foreign(parameter: Tensor, own: list[Contribution], rest: list[Contribution]) -> bool:
    only = frozenset((id(parameter),))
    return any(not c.empty and c.reaches(only) for c in own) or not any(c.reaches(only) for c in rest)


def _message(binding: Binding, parameters: list[Tensor], how: str) -> tuple[str, str]:
    names = ", ".join(binding.name_of(p) for p in parameters[:4])
    kinds = " and ".join(type(o).__name__ for o in binding.optimizers)
    return (
        f"gradients on {len(parameters)} parameters of another optimizer's ({kinds}: {names}) {how}: two losses would "
        "be mixed in its next update",
        "manager.backward(loss, inputs=model.parameters()) keeps a loss to its own model; for one backward shared by "
        "several optimizers, step(models, [optimizer, optimizer])",
    )
