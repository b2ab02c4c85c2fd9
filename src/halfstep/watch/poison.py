"""Running statistics that a non-finite batch has poisoned: the forward folds them in, whatever becomes of the update.

While operators are looked at, a batch norm shows it at once. Otherwise the buffers of the modules seen are read when
something went wrong, at the first evaluation after training, and at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Place, StatisticsPoisoned
from halfstep.watch.look import Operation
from halfstep.watch.modules import Modules
from halfstep.watch.patches import Patches
from halfstep.watch.paths import Paths
from halfstep.watch.provenance import Provenance
from halfstep.watch.ranges import address

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_NORMS = frozenset(
    (
        *("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_batch_norm_with_update",),
    )
)
_BUFFERS = ("running_mean", "running_var")
_OFTEN = 32  # evaluations at whose start the buffers are read, then 2^k


class Poison:
    """Tells of buffers that are still not finite at the next call of their root module: some scripts put them back."""

    def __init__(self, session: Session, paths: Paths, provenance: Provenance, modules: Modules) -> None:
        self._session = session
        self._paths = paths
        self._provenance = provenance
        self._modules = modules
        self._trained: weakref.WeakKeyDictionary[torch.nn.Module, Place | None] = weakref.WeakKeyDictionary()
        self._suspects: weakref.WeakKeyDictionary[torch.nn.Module, Place | None] = weakref.WeakKeyDictionary()
        self._told: set[int] = set()
        self._training = False
        self._evaluations = 0

    def install(self, patches: Patches) -> None:
        if self not in self._session.look.lenses:
            self._session.look.lenses.append(self)
            self._modules.entries.append(self._called)

    def remove(self) -> None:
        for root in list(self._trained):
            self._inspect(root)

    # -- where nobody looked -------------------------------------------------------------------------------------

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any, at: Place | None) -> None:
        if module in self._suspects:
            self._inspect(module)
        if module.training and torch.is_grad_enabled():
            self._training = True
            self._trained[module] = at
        elif self._training and not module.training:
            self._training = False
            self._evaluations += 1
            if self._evaluations <= _OFTEN or self._evaluations & (self._evaluations - 1) == 0:
                self.remove()

    def suspect(self) -> None:
        """Something went wrong: the modules that were trained are looked at when they are called again."""
        for root, at in self._trained.items():
            self._suspects.setdefault(root, at)

    def _inspect(self, root: torch.nn.Module) -> None:
        """Tell which running statistics of this module are not finite."""
        at = self._suspects.pop(root, None) or self._trained.get(root)
        with torch.no_grad():
            bad = list(_poisoned(root, self._told))
            if not bad:
                return
            self._told.update(address(buffer) for _, _, buffer in bad)
            self._session.stream.emit(
                StatisticsPoisoned,
                at=at,
                module=f"{self._paths.name(root)}.{bad[0][0]}".rstrip("."),
                buffers=tuple(dict.fromkeys(kind for _, kind, _ in bad)),
                weights=all(bool(torch.isfinite(p).all()) for p in root.parameters()),
            )

    # -- the lens ------------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        origin = self._provenance.now
        if origin is None or origin.finite or operation.backward or operation.name not in _NORMS:
            return
        root = self._paths.root()
        if root is not None:
            self._suspects.setdefault(root, self._paths.root_at or operation.at)


def _poisoned(root: torch.nn.Module, told: set[int]) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, module in root.named_modules():
        for kind in _BUFFERS:
            buffer = getattr(module, kind, None)
            if not isinstance(buffer, torch.Tensor) or not buffer.is_floating_point() or address(buffer) in told:
                continue
            if not bool(torch.isfinite(buffer).all()):
                yield name, kind, buffer
