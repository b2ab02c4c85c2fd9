"""Gradients that a script edits by hand, seen operator by operator: multiplied, clipped, zeroed, replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Clipped, GradientsEdited, Place
from halfstep.watch.gradients import Gradients, Mark
from halfstep.watch.look import Operation
from halfstep.watch.powers import Powers, number_of, power_of_factor
from halfstep.watch.stream import Draft

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_EDITS = frozenset(("mul_", "div_", "_foreach_mul_", "_foreach_div_"))
_CLAMPS = frozenset(("clamp_", "clamp_max_", "clamp", "hardtanh_"))
_ZEROS = frozenset(("zero_", "_foreach_zero_"))
_COPIED = frozenset(("mul", "div", "clamp"))
_KEPT = 4096  # copies of gradients remembered between two known calls


class Edits:
    """Knows gradients by their storage and tells what is written to them, with the number they are multiplied by.

    ``measured``: the largest measure of scaled gradients that the script has read since the last known call.
    """

    def __init__(self, session: Session, gradients: Gradients, powers: Powers) -> None:
        self._session = session
        self._gradients = gradients
        self._powers = powers
        self._storages: dict[int, int] = {}  # storage of a gradient -> its optimizer
        self._extents: dict[tuple[int, int], int] = {}  # where in a storage a gradient begins -> its elements
        self._moved = -1
        self._edits: dict[tuple[int, Place | None, str], Draft] = {}
        self._copies: dict[int, tuple[str, Any, Place | None]] = {}  # storage -> gradient times a number, by operator
        self._unscaling: dict[int, Mark] = {}  # optimizers whose gradients the script is dividing by this scale
        self.measured: float | None = None

    def written(self, operation: Operation) -> None:
        """An operator is about to write: tell it, where gradients are among what it writes to."""
        owners = self._owners(written(operation))
        if owners:
            self._edit(operation, owners)

    def _edit(self, operation: Operation, owners: dict[int, int]) -> None:
        name = operation.name
        if not all(self._is_whole(t) for t in written(operation)):
            self._note(name, owners, operation.at, None, False)  # a row or a slice of a gradient
            return
        factor = operation.args[1] if name in _EDITS and len(operation.args) > 1 else None
        if isinstance(factor, (list, tuple)):
            factor = factor[0] if factor else None
        if name in _CLAMPS:
            self._clamp(operation, operation.args[0], owners, operation.at)
        elif factor is not None and self._scales_to_limit(name, factor, owners, operation.at):
            pass
        elif name in _EDITS and (isinstance(factor, (int, float)) or number_of(factor) is not None):
            inverse = name.startswith(("div", "_foreach_div"))
            self._multiplied(name, factor, inverse, owners, operation.at)
        elif name == "copy_" and self._copied(operation, owners):
            pass
        else:
            zeroed = name in _ZEROS or (name == "fill_" and number_of(operation.args[1]) == 0.0)
            self._note(name, owners, operation.at, None, zeroed)

    def _multiplied(self, name: str, factor: Any, inverse: bool, owners: dict[int, int], at: Place | None) -> None:
        number = number_of(factor)
        number = None if number is None or (inverse and number == 0) else 1 / number if inverse else number
        self._note(name, owners, at, number, number == 0.0)
        for ident in owners:
            mark = self._gradients.carried.get(ident)
            if mark is not None and number is not None and power_of_factor(number, mark) == -1.0:
                self._unscaling[ident] = self._gradients.carried.pop(ident)

    def _note(self, name: str, owners: dict[int, int], at: Place | None, number: float | None, zeroed: bool) -> None:
        for ident, count in owners.items():
            draft = self._edits.get((ident, at, name))
            if draft is None:
                draft = self._session.stream.emit(
                    GradientsEdited,
                    at=at,
                    optimizers={ident: count},
                    operator=name,
                    factor=number,
                    zeroed=zeroed,
                )
                self._edits[ident, at, name] = draft
                continue
            draft.fields["optimizers"] = {ident: draft.fields["optimizers"][ident] + count}
            if draft.fields["factor"] != number:
                draft.fields["factor"] = None  # a factor for each parameter
            draft.fields["zeroed"] = bool(draft.fields["zeroed"] and zeroed)

    def _scales_to_limit(self, name: str, factor: Any, owners: dict[int, int], at: Place | None) -> bool:
        """A factor that brings a norm measured by hand down to a limit: clipping by hand."""
        number = number_of(factor)
        if number is None or number <= 0:
            return False
        plain = number < 1
        if name.startswith(("div", "_foreach_div")):
            plain, number = number > 1 and number != int(number), 1 / number
        marks = {**self._unscaling, **self._gradients.carried}
        mark = next((marks[i] for i in owners if i in marks), None)
        if mark is None or power_of_factor(number, mark) == -1.0:
            return False
        known = self._powers.get(factor) if isinstance(factor, torch.Tensor) else None
        norm = self.measured if known is None or known.norm is None else number_of(known.norm)
        if norm is None or (known is None and not plain):
            return False
        self._clipped("norm", number * norm, norm, owners, at)
        return True

    def _clamp(self, operation: Operation, gradient: Any, owners: dict[int, int], at: Place | None) -> None:
        bounds = [number_of(v) for v in (*operation.args[1:], *operation.kwargs.values())]
        limit = max((abs(b) for b in bounds if b is not None), default=None)
        if limit is None:
            self._note(operation.name, owners, at, None, False)
            return
        self._clipped("value", limit, None, owners, at)

    def _clipped(self, kind: str, limit: float, norm: float | None, owners: dict[int, int], at: Place | None) -> None:
        key = (min(owners), at, f"clip {kind}")
        draft = self._edits.get(key)
        if draft is not None:
            for ident, count in owners.items():
                draft.fields["optimizers"][ident] = draft.fields["optimizers"].get(ident, 0) + count
            return
        self._edits[key] = self._session.stream.emit(
            Clipped, at=at, kind=kind, limit=limit, norm=norm, optimizers=dict(owners), by_hand=True
        )

    # -- gradients replaced by a copy ----------------------------------------------------------------------------

    def computed(self, operation: Operation) -> None:
        """Remember `p.grad * number`, in case it becomes the gradient."""
        if operation.name not in _COPIED or not self._storages:
            return
        first, *rest = operation.args
        if not isinstance(first, torch.Tensor) or not isinstance(operation.out, torch.Tensor) or not rest:
            return
        if self.owner(first) is not None and first.numel() > 1:
            if len(self._copies) > _KEPT:
                self._copies.clear()
            self._copies[storage(operation.out)] = (operation.name, rest, operation.at)

    def _copied(self, operation: Operation, owners: dict[int, int]) -> bool:
        source = operation.args[1] if len(operation.args) > 1 else None
        made = self._copies.get(storage(source)) if isinstance(source, torch.Tensor) else None
        if made is None:
            return False
        self._replaced(made, owners)
        return True

    def _replaced(self, made: tuple[str, Any, Place | None], owners: dict[int, int]) -> None:
        name, rest, at = made
        if name == "clamp":
            limit = max((abs(b) for b in map(number_of, rest) if b is not None), default=None)
            if limit is not None:
                self._clipped("value", limit, None, owners, at)
        elif number_of(rest[0]) is None:
            self._note(name, owners, at, None, False)
        elif not self._scales_to_limit(name, rest[0], owners, at):
            self._multiplied(name, rest[0], name == "div", owners, at)

    def flush(self) -> set[int]:
        """End of a stretch of the script's own work: whose gradients were told to be edited in it."""
        if self._copies:
            for ident, optimizer in self._session.ledger.optimizers():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        made = self._copies.get(storage(p.grad)) if is_plain(p.grad) else None
                        if made is not None:
                            self._replaced(made, {ident: 1})
            self._copies.clear()
        told: set[int] = set()
        for draft in self._edits.values():
            owners = draft.fields["optimizers"]
            told.update(owners)
            if draft.fields.get("zeroed") and any(n < self._held(ident) for ident, n in owners.items()):
                draft.fields["zeroed"] = False  # only some of the gradients
        self._edits.clear()
        self._unscaling.clear()
        self.measured = None
        return told

    def _held(self, ident: int) -> int:
        return sum(owner == ident for owner in self._storages.values())

    # -- whose gradient is it ------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Find gradients again where they may have moved; whether there are any."""
        if self._moved == self._gradients.moved:
            return bool(self._storages)
        self._moved = self._gradients.moved
        grads = [
            (ident, p.grad)
            for ident, optimizer in self._session.ledger.optimizers()
            for group in optimizer.param_groups
            for p in group["params"]
            if is_plain(p.grad)
        ]
        self._storages = {storage(grad): ident for ident, grad in grads}
        self._extents = {(storage(grad), int(grad.storage_offset())): grad.numel() for _, grad in grads}
        return bool(self._storages)

    def owner(self, tensor: torch.Tensor) -> int | None:
        """The optimizer whose gradient lies in this tensor's storage."""
        return self._storages.get(storage(tensor)) if self._storages else None

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Not a row or slice of a gradient (gradients may themselves be parts of one bucket)."""
        extent = self._extents.get((storage(tensor), int(tensor.storage_offset()))) if is_plain(tensor) else None
        return extent is not None and extent <= tensor.numel()

    def _owners(self, tensors: list[torch.Tensor]) -> dict[int, int]:
        owners: dict[int, int] = {}
        if not self.refresh():
            return owners
        for tensor in tensors:
            ident = self.owner(tensor)
            if ident is not None:
                owners[ident] = owners.get(ident, 0) + 1
        return owners


def written(operation: Operation) -> list[torch.Tensor]:
    """The tensors an operator writes to: its first argument, a tensor or a list of them."""
    if not operation.mutates or not operation.args:
        return []
    first = operation.args[0]
    return [t for t in (first if isinstance(first, (list, tuple)) else (first,)) if isinstance(t, torch.Tensor)]


def is_plain(tensor: Any) -> bool:
    """Whether this is a tensor whose storage may be asked for."""
    return isinstance(tensor, torch.Tensor) and _has_storage(tensor) and tensor.numel() > 0


def storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 for one that has none."""
    return tensor.untyped_storage().data_ptr() if _has_storage(tensor) else 0


def _has_storage(tensor: torch.Tensor) -> bool:
    """A sharded tensor is a wrapper: its own storage is none."""
    return tensor.layout is torch.strided and not hasattr(tensor, "placements")
