"""What a script does to gradients by its own hands: measured, multiplied, clipped; gradients taken into a loss.

A lens: it works while a look is open. Edits are told with the number they multiplied by, measures when their value
reaches the script and still carries the loss scale, and gradients of a scaled output when they meet values that do
not carry it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Clipped, GradientsEdited, GradientsRead, PenaltyMixed, Place
from halfstep.watch.gradients import Gradients, Mark
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.powers import (
    COMPARISONS,
    DIFFERENCES,
    EXPONENTS,
    MEASURES,
    PRODUCTS,
    QUOTIENTS,
    SAME,
    SUMS,
    TINY,
    Carried,
    Origin,
    Powers,
    combined,
    number_of,
    power_of_factor,
)
from halfstep.watch.stream import Draft, Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_EDITS = frozenset(("mul_", "div_", "_foreach_mul_", "_foreach_div_"))
_CLAMPS = frozenset(("clamp_", "clamp_max_", "clamp", "hardtanh_"))
_ZEROS = frozenset(("zero_", "_foreach_zero_"))


class Hands:
    def __init__(self, session: Session, gradients: Gradients) -> None:
        self._session = session
        self._gradients = gradients
        gradients.hands = self
        self._powers = Powers()
        self._storages: dict[int, int] = {}  # storage of a gradient -> its optimizer
        self._extents: dict[tuple[int, int], int] = {}  # where in a storage a gradient begins -> its elements
        self._moved = -1
        self._edits: dict[tuple[int, Place | None, str], Draft] = {}
        self._copies: dict[int, tuple[str, Any, Place | None]] = {}  # storage -> gradient times a number, by operator
        self._unscaling: dict[int, Mark] = {}  # optimizers whose gradients the script is dividing by this scale
        self._reads: set[Place | None] = set()
        self._value: float | None = None  # the largest measure of scaled gradients that went to the host

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)
        patches.around(torch._tensor_str, "_str", self._before_print)  # where a mode sees nothing

    def _before_print(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = kwargs.get("self", args[0] if args else None)
        if isinstance(tensor, torch.Tensor) and (self._powers or self._gradients.carried):
            self._refresh()
            carried = self._carried(tensor)
            if carried is not None and not carried.measured:
                at = self._session.place()
                carried = replace(carried, measured=True, origin=replace(carried.origin, at=at, how="print"))
            if carried is not None:
                self._used(carried, "read", tensor)

    # -- the lens ------------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        if operation.backward or self._gradients.busy > 0:
            return
        owners = self._owners([t for t in _written(operation) if isinstance(t, torch.Tensor)])
        if owners:
            self._edit(operation, owners)

    def after(self, operation: Operation) -> None:
        if operation.backward or self._gradients.busy > 0:
            return
        self._refresh()
        if not self._storages and not self._powers:
            return
        name = operation.name
        args: list[tuple[Any, Carried | None]] = []
        for value in operation.args:
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            args.append((value, self._carried(first) if isinstance(first, torch.Tensor) else None))
        if not any(c is not None for _, c in args):
            if name in ("mul", "div", "clamp"):
                self._copy(operation)
            return
        if name in ("mul", "div", "clamp"):
            self._copy(operation)
        self._follow(operation, name, args)

    def _carried(self, tensor: torch.Tensor) -> Carried | None:
        """What this argument carries: known from before, or because it is a gradient under a scale."""
        known = self._powers.get(tensor)
        if known is not None:
            return known
        owner = self._storages.get(_storage(tensor))
        mark = self._gradients.carried.get(owner) if owner is not None else None
        if mark is None or owner is None:
            return None
        return Carried(1.0, Origin(mark, owners={owner: 1}))

    def _follow(self, operation: Operation, name: str, args: list[tuple[Any, Carried | None]]) -> None:
        first = next(c for _, c in args if c is not None)
        result: Carried | None = None
        if name == "_local_scalar_dense":
            self._used(first, "read", operation.args[0])
            if first.measured and first.power > 0:
                self._value = max(self._value or 0.0, number_of(operation.args[0]) or 0.0)
        elif name in COMPARISONS:
            if self._is_foreign(args[1]) and args[0][1] is not None:
                self._used(first, "compared", operation.args[0])
        elif name in SUMS or name in DIFFERENCES:
            result = self._sum(operation, args, first)
        elif name in PRODUCTS or name in QUOTIENTS or name in EXPONENTS or name == "pow":
            result = combined(name, args, operation.args[1] if len(operation.args) > 1 else None)
        elif name in SAME or name == "clamp":
            result = first
        if result is None or not self._keeps(operation):
            self._powers.drop([t for t in _written(operation) if isinstance(t, torch.Tensor)])
            return
        if not result.origin.penalty and (name in MEASURES or (result.measured and result.power > 0)):
            origin = result.origin
            if origin.at is None and not origin.told:
                origin = Origin(origin.mark, operation.at, name, owners=origin.owners)
            result = Carried(result.power, origin, norm=_scalar(operation.out, result.norm), measured=True)
        self._powers.put(operation.out, result)

    def _keeps(self, operation: Operation) -> bool:
        """Whether what was computed is a value of its own: no gradient, no parameter, nothing written into."""
        out = operation.out[0] if isinstance(operation.out, (list, tuple)) and operation.out else operation.out
        if not isinstance(out, torch.Tensor) or _storage(out) in self._storages:
            return False
        return not operation.mutates or self._powers.get(out) is not None or out.numel() == 1

    def _sum(self, operation: Operation, args: list[tuple[Any, Carried | None]], first: Carried) -> Carried | None:
        carried = [c for _, c in args[:2] if c is not None]
        if len(carried) == 2:
            if carried[0].power == carried[1].power:
                return first
            self._mixed(first if first.power else carried[1], operation)
            return None
        if not self._is_foreign(next(a for a in args[:2] if a[1] is None)) or first.power == 0.0:
            return first
        self._mixed(first, operation)
        return first if not first.origin.penalty else None

    def _is_foreign(self, argument: tuple[Any, Carried | None]) -> bool:
        """Something that does not carry the scale and is not merely zero, infinite or there to avoid a zero."""
        value, carried = argument
        if carried is not None:
            return False
        number = number_of(value)
        if isinstance(value, torch.Tensor):
            return number != 0.0
        return number is not None and TINY < abs(number) < float("inf")

    # -- what is told --------------------------------------------------------------------------------------------

    def _used(self, carried: Carried, use: str, tensor: torch.Tensor) -> None:
        origin = carried.origin
        if origin.penalty or not carried.measured or carried.power <= 0.0 or origin.told or origin.at in self._reads:
            return
        origin.told = True
        self._reads.add(origin.at)
        self._session.stream.emit(
            GradientsRead,
            at=origin.at,
            optimizers=dict(origin.owners or {}),
            how=origin.how,
            value=Late(tensor.reshape(())) if tensor.numel() == 1 else None,
            power=carried.power,
            use=use,
            scale=Late(origin.mark.scale),
            scaler=origin.mark.scaler,
        )

    def _mixed(self, carried: Carried, operation: Operation) -> None:
        origin = carried.origin
        if not origin.penalty or origin.told:
            return
        if not origin.graph and not any(t.requires_grad for t in operation.tensors()):
            return
        origin.told = True
        self._tell_penalty(carried, operation.name, operation.at)

    def _tell_penalty(self, carried: Carried, operator: str, at: Place | None) -> None:
        mark = carried.origin.mark
        self._session.stream.emit(
            PenaltyMixed,
            at=carried.origin.at,
            scale=Late(mark.scale),
            scaler=mark.scaler,
            power=carried.power,
            operator=operator,
            mixed_at=at,
        )

    def measured(self, norm: torch.Tensor, owners: dict[int, int], at: Place | None) -> None:
        """A clipping function gave back the norm it found."""
        mark = next((self._gradients.carried[i] for i in owners if i in self._gradients.carried), None)
        if mark is not None and self._session.look.is_open:
            origin = Origin(mark, at, "clip_grad_norm_", owners=dict(owners))
            self._powers.put(norm, Carried(1.0, origin, norm=norm.detach(), measured=True))

    def taken(self, results: Any, mark: Mark, graph: bool, at: Place | None) -> None:
        """`autograd.grad` of a scaled output gave these."""
        if self._session.look.is_open:
            origin = Origin(mark, at, "autograd.grad", penalty=True, graph=graph)
            self._powers.put([r for r in results if isinstance(r, torch.Tensor)], Carried(1.0, origin))

    def scaled(self, inputs: list[torch.Tensor], results: Any, scale: torch.Tensor | None, mark: Mark) -> None:
        """`scaler.scale` made these of those: a loss that still carries the scale should not have come here."""
        if not self._session.look.is_open:
            return
        for tensor in inputs:
            carried = self._powers.get(tensor)
            if carried is not None and carried.power != 0.0 and carried.origin.penalty and not carried.origin.told:
                carried.origin.told = True
                self._tell_penalty(carried, "scaler.scale", self._session.place())
        for tensors in (results, scale):
            self._powers.put(tensors, Carried(1.0, Origin(mark, how="scaler.scale", told=True)))

    # -- edits ---------------------------------------------------------------------------------------------------

    def _edit(self, operation: Operation, owners: dict[int, int]) -> None:
        name = operation.name
        if not all(self._is_whole(t) for t in _written(operation) if isinstance(t, torch.Tensor)):
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
        norm = self._value if known is None or known.norm is None else number_of(known.norm)
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

    def _copy(self, operation: Operation) -> None:
        """Remember `p.grad * number`, in case it becomes the gradient."""
        first, *rest = operation.args
        if not isinstance(first, torch.Tensor) or not isinstance(operation.out, torch.Tensor) or not rest:
            return
        if first.layout is torch.strided and _storage(first) in self._storages and first.numel() > 1:
            if len(self._copies) > 4096:
                self._copies.clear()
            self._copies[_storage(operation.out)] = (operation.name, rest, operation.at)

    def _copied(self, operation: Operation, owners: dict[int, int]) -> bool:
        source = operation.args[1] if len(operation.args) > 1 else None
        made = self._copies.get(_storage(source)) if isinstance(source, torch.Tensor) else None
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
                        made = self._copies.get(_storage(p.grad)) if _is_plain(p.grad) else None
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
        self._reads.clear()
        self._unscaling.clear()
        self._value = None
        return told

    def _held(self, ident: int) -> int:
        return sum(owner == ident for owner in self._storages.values())

    # -- whose gradient is it ------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if self._moved == self._gradients.moved:
            return
        self._moved = self._gradients.moved
        grads = [
            (ident, p.grad)
            for ident, optimizer in self._session.ledger.optimizers()
            for group in optimizer.param_groups
            for p in group["params"]
            if _is_plain(p.grad)
        ]
        self._storages = {_storage(grad): ident for ident, grad in grads}
        self._extents = {(_storage(grad), int(grad.storage_offset())): grad.numel() for _, grad in grads}

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Not a part of a gradient (gradients may themselves be parts of one bucket)."""
        extent = self._extents.get((_storage(tensor), int(tensor.storage_offset()))) if _is_plain(tensor) else None
        return extent is None or extent <= tensor.numel()

    def _owners(self, tensors: list[torch.Tensor]) -> dict[int, int]:
        self._refresh()
        owners: dict[int, int] = {}
        for tensor in tensors:
            ident = self._storages.get(_storage(tensor)) if self._storages else None
            if ident is not None:
                owners[ident] = owners.get(ident, 0) + 1
        return owners


def _written(operation: Operation) -> list[Any]:
    """The tensors an operator writes to: its first argument, a tensor or a list of them."""
    if not operation.mutates or not operation.args:
        return []
    first = operation.args[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _scalar(out: Any, otherwise: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(out, (list, tuple)):
        out = out[0] if len(out) == 1 else None
    return out.detach() if isinstance(out, torch.Tensor) and out.numel() == 1 else otherwise
