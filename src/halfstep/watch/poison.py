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
    def __init__(self, session: Session, paths: Paths, provenance: Provenance, modules: Modules) -> None:
        self._session = session
        self._paths = paths
        self._provenance = provenance
        self._modules = modules
        self._trained: weakref.WeakKeyDictionary[torch.nn.Module, Place | None] = weakref.WeakKeyDictionary()
        self._told: set[int] = set()
        self._training = False
        self._evaluations = 0

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)
        self._modules.entries.append(self._called)

    def remove(self) -> None:
        self.inspect()

    # -- where nobody looked -------------------------------------------------------------------------------------

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any, at: Place | None) -> None:
        if module.training and torch.is_grad_enabled():
            self._training = True
            self._trained[module] = at
        elif self._training and not module.training:
            self._training = False
            self._evaluations += 1
            if self._evaluations <= _OFTEN or self._evaluations & (self._evaluations - 1) == 0:
                self.inspect()

    def inspect(self) -> None:
        """Read the running statistics of all modules that were trained; tell those that are not finite."""
        with torch.no_grad():
            for root, at in list(self._trained.items()):
                bad = list(_poisoned(root, self._told))
                if bad:
                    self._told.update(address(buffer) for _, _, buffer in bad)
                    self._tell(f"{self._paths.name(root)}.{bad[0][0]}", tuple(b for _, b, _ in bad), root, at)

    def _tell(self, name: str, buffers: tuple[str, ...], root: torch.nn.Module | None, at: Place | None) -> None:
        weights = None
        if root is not None:
            weights = all(bool(torch.isfinite(p).all()) for p in root.parameters())
        self._session.stream.emit(
            StatisticsPoisoned, at=at, module=name, buffers=tuple(dict.fromkeys(buffers)), weights=weights
        )

    # -- the lens ------------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        origin = self._provenance.now
        if origin is None or origin.finite or operation.name not in _NORMS:
            return
        buffers = dict(zip(_BUFFERS, operation.args[3:5], strict=False))
        bad = [
            name
            for name, buffer in buffers.items()
            if isinstance(buffer, torch.Tensor)
            and address(buffer) not in self._told
            and not bool(torch.isfinite(buffer).all())
        ]
        if bad:
            self._told.update(address(buffers[name]) for name in bad)
            root = self._paths.root()
            self._tell(origin.path or "batch norm", tuple(bad), root, self._paths.root_at or operation.at)


def _poisoned(root: torch.nn.Module, told: set[int]) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, module in root.named_modules():
        for kind in _BUFFERS:
            buffer = getattr(module, kind, None)
            if not isinstance(buffer, torch.Tensor) or not buffer.is_floating_point() or address(buffer) in told:
                continue
            if not bool(torch.isfinite(buffer).all()):
                yield name, kind, buffer
