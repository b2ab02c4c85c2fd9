"""What became of every gradient and parameter, from identities and version counters alone: no value is read.

A gradient's version counter rises by one with every in-place change (accumulating, zeroing, scaling), and a new tensor
means that the old one was cleared. Comparing two moments therefore tells which parameters received a contribution and
whether somebody else touched a gradient or a parameter in between. Fused optimizers do not bump parameters' counters,
nor do writes through ``.data``; a look (see ``look``) sees those.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

Optimizer = torch.optim.Optimizer


@dataclass(slots=True)
class Change:
    """What changed for one optimizer's parameters since the last look at them, in parameter tensors."""

    arrived: int = 0
    accumulated: int = 0
    replaced: int = 0
    cleared: int = 0
    parameters: int = 0
    reached: int = 0  # which parameters received, as one number
    hooked: bool = False  # the script's own hooks may have changed what arrived
    kept: int = 0  # gradients that are still what they were
    touched: list[torch.Tensor] = field(default_factory=list)

    @property
    def received(self) -> int:
        return self.arrived + self.accumulated + self.replaced


class _Account:
    __slots__ = ("grads", "ident", "ref", "thread", "values", "versions")

    def __init__(self, optimizer: Optimizer, ident: int) -> None:
        self.ref = weakref.ref(optimizer)
        self.ident = ident
        self.thread = threading.get_ident()  # the one that handled the optimizer last
        self.grads: dict[int, int] = {}  # id(parameter) -> id(gradient)
        self.versions: dict[int, int] = {}  # id(parameter) -> the gradient's version
        self.values: dict[int, int] = {}  # id(parameter) -> the parameter's own version

    def parameters(self) -> Iterator[torch.Tensor]:
        optimizer = self.ref()
        if optimizer is not None:
            for group in optimizer.param_groups:
                yield from group["params"]


def _mixed(number: int) -> int:
    """Addresses differ in few bits: mixed, so that their sum without carry tells sets apart."""
    return (number * 0x9E37_79B9_7F4A_7C15 >> 13) & 0xFFFF_FFFF_FFFF


class Ledger:
    """Numbers optimizers as they appear and compares their gradients between two moments."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}  # id(optimizer) -> account
        self._numbers = itertools.count(1)
        self._threads: set[int] = set()

    def ident(self, optimizer: Optimizer) -> int:
        """The optimizer's number in this run; a new one is entered with its gradients as they are now."""
        account = self._accounts.get(id(optimizer))
        if account is None or account.ref() is not optimizer:
            account = _Account(optimizer, next(self._numbers))
            self._accounts[id(optimizer)] = account
            self._settle(account)
        account.thread = threading.get_ident()
        return account.ident

    def newest(self) -> int:
        """The number of the optimizer entered last; 0 before the first."""
        return max((account.ident for account in self._accounts.values()), default=0)

    def knows(self, optimizer: Optimizer) -> bool:
        account = self._accounts.get(id(optimizer))
        return account is not None and account.ref() is optimizer

    def optimizers(self) -> Iterator[tuple[int, Optimizer]]:
        for account in list(self._accounts.values()):
            optimizer = account.ref()
            if optimizer is not None:
                yield account.ident, optimizer

    def compare(self) -> dict[int, Change]:
        """What changed since the last comparison, by optimizer number (only those where something did).

        Where several threads train, each is told of the optimizers that it handled last.
        """
        changes: dict[int, Change] = {}
        here = threading.get_ident()
        self._threads.add(here)
        several = len(self._threads) > 1
        for key, account in list(self._accounts.items()):
            if account.ref() is None:
                del self._accounts[key]
                continue
            if several and account.thread != here:
                continue
            change = self._settle(account)
            if change is not None:
                changes[account.ident] = change
        return changes

    def _settle(self, account: _Account) -> Change | None:
        change: Change | None = None
        kept = 0
        grads, versions, values = account.grads, account.versions, account.values
        for parameter in account.parameters():
            key = id(parameter)
            grad = parameter.grad
            value = parameter._version
            if values.get(key) != value:
                if key in values:
                    change = change or Change()
                    change.parameters += 1
                values[key] = value
            if grad is None:
                if grads.pop(key, None) is not None:
                    change = change or Change()
                    change.cleared += 1
                continue
            version = grad._version
            old = grads.get(key)
            if old == id(grad) and versions[key] == version:
                kept += 1
                continue
            change = change or Change()
            if old is None:
                change.arrived += 1
            elif old == id(grad):
                change.accumulated += 1
            else:
                change.replaced += 1
            change.touched.append(grad)
            change.reached ^= _mixed(key)
            change.hooked |= bool(parameter._backward_hooks)
            grads[key], versions[key] = id(grad), version
        if change is not None:
            change.kept = kept
        return change
