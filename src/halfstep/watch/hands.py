"""What a script does with gradients by its own hands: measures them, edits them, takes them into a loss.

A lens: it works while a look is open. Measures are told when their value reaches the script and still carries the loss
scale, gradients of a scaled output when they meet values that do not carry it; edits stand in a file of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import GradientsRead, PenaltyMixed, Place
from halfstep.watch.edits import Edits, written
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
)
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session


class Hands:
    """Follows the loss scale from gradients into what the script computes of them (see `powers` and `edits`)."""

    def __init__(self, session: Session, gradients: Gradients) -> None:
        self._session = session
        self._gradients = gradients
        gradients.hands = self
        self._powers = Powers()
        self._edits = Edits(session, gradients, self._powers)
        self._reads: set[Place | None] = set()

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)
        patches.around(torch._tensor_str, "_str", self._before_print)  # where a mode sees nothing

    def _before_print(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = kwargs.get("self", args[0] if args else None)
        if isinstance(tensor, torch.Tensor) and (self._powers or self._gradients.carried):
            self._edits.refresh()
            carried = self._carried(tensor)
            if carried is not None and not carried.measured:
                at = self._session.place()
                carried = replace(carried, measured=True, origin=replace(carried.origin, at=at, how="print"))
            if carried is not None:
                self._used(carried, "read", tensor)

    # -- the lens ------------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        if not operation.backward and self._gradients.busy <= 0:
            self._edits.written(operation)

    def after(self, operation: Operation) -> None:
        if operation.backward or self._gradients.busy > 0:
            return
        if not self._edits.refresh() and not self._powers:
            return
        args: list[tuple[Any, Carried | None]] = []
        for value in operation.args:
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            args.append((value, self._carried(first) if isinstance(first, torch.Tensor) else None))
        self._edits.computed(operation)
        if any(c is not None for _, c in args):
            self._follow(operation, operation.name, args)

    def _carried(self, tensor: torch.Tensor) -> Carried | None:
        """What this argument carries: known from before, or because it is a gradient under a scale."""
        known = self._powers.get(tensor)
        if known is not None:
            return known
        owner = self._edits.owner(tensor)
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
                self._edits.measured = max(self._edits.measured or 0.0, number_of(operation.args[0]) or 0.0)
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
            self._powers.drop(written(operation))
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
        if not isinstance(out, torch.Tensor) or self._edits.owner(out) is not None:
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

    def flush(self) -> set[int]:
        """End of a stretch of the script's own work: whose gradients were told to be edited in it."""
        self._reads.clear()
        return self._edits.flush()


def _scalar(out: Any, otherwise: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(out, (list, tuple)):
        out = out[0] if len(out) == 1 else None
    return out.detach() if isinstance(out, torch.Tensor) and out.numel() == 1 else otherwise
