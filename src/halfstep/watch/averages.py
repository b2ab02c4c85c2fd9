"""Averages of weights: every update of one, by `AveragedModel` or by hand, told by its arithmetic.

A new value made of c times a parameter and (1 - c) times something else of its shape is an average of that parameter,
however it is written: ``avg.lerp_(p, c)``, ``avg.mul_(d).add_(p, alpha=1 - d)``, ``avg -= (1 - d) * (avg - p)``,
``new = d * old + (1 - d) * p``, list operators. What is part of a graph is no average but a model's own arithmetic.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

from halfstep.events import AverageUpdated, Place
from halfstep.watch.halves import HALF, Halves
from halfstep.watch.look import Operation
from halfstep.watch.parameters import Parameters
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users, place
from halfstep.watch.stream import Draft, Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_KEPT = 4096  # values followed
_SAMPLE = 2048  # elements of a half-precision average looked at
_NEAR = 0.02  # of the smaller share: how far the two may be from one together
_FAR = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}  # of its size: an average so far off has a way to go
_DENSE = 32


@dataclass(slots=True)
class _Value:
    """What a tensor holds: ``share`` of a parameter and ``old`` of another value (itself, or the one at ``origin``)."""

    share: float
    old: float
    parameter: int  # address
    optimizer: int | None
    before: torch.Tensor | None = None  # a sample of the average as it was
    elements: int = 0

    def times(self, factor: float) -> _Value:
        return _Value(self.share * factor, self.old * factor, self.parameter, self.optimizer, self.before)


@dataclass(slots=True)
class _Average:
    number: int
    first: int = 0
    updates: int = 0
    draft: Draft | None = None
    owners: dict[int, int] | None = None  # optimizer -> its parameters that are averaged


class Averages:
    def __init__(self, session: Session, parameters: Parameters, halves: Halves) -> None:
        self._session = session
        self._parameters = parameters
        self._halves = halves
        self._values: OrderedDict[int, _Value] = OrderedDict()  # address -> what it holds
        self._averages: dict[Any, _Average] = {}
        self._loops: frozenset[CodeType] = frozenset()  # the user's functions around the last backward
        self._inside: Draft | None = None

    def install(self, patches: Patches) -> None:
        patches.around(AveragedModel, "update_parameters", self._before_average, self._after_average, self._failed)
        patches.around(torch.autograd, "backward", self._before_backward)
        if self not in self._session.look.lenses:
            self._session.look.lenses.append(self)

    # -- AveragedModel -------------------------------------------------------------------------------------------

    def _before_average(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        averaged, model = args[0], kwargs.get("model", args[1] if len(args) > 1 else None)
        if not isinstance(model, torch.nn.Module):
            return None
        average = self._average(("model", self._session.ident("module", averaged)))
        average.updates += 1
        if average.owners is None or _is_due(average.updates):
            idents = [i for i in map(self._parameters.owner, model.parameters()) if i is not None]
            average.owners = {i: idents.count(i) for i in set(idents)}
        pairs = [
            (a.detach(), p.detach())
            for a, p in zip(averaged.module.parameters(), model.parameters(), strict=False)
            if a.dtype in HALF
        ]
        looked = bool(pairs) and average.updates > 1 and _is_due(average.updates)
        before = [(a, _sample(a).clone(), p) for a, p in pairs[:4]] if looked else []
        self._inside = self._session.stream.emit(
            AverageUpdated,
            at=self._session.place(),
            average=average.number,
            optimizers=dict(average.owners),
            how="AveragedModel.update_parameters",
            dtype=_dtype(averaged.module),
        )
        return before

    def _after_average(self, before: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        draft, self._inside = self._inside, None
        if draft is not None and before:
            self._stood(draft, before)

    def _failed(self, token: Any, error: BaseException) -> None:
        self._inside = None

    def _stood(self, draft: Draft, before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Among elements far from their parameter: the share that the update left where they were."""
        with torch.no_grad():
            counts = [_still(average, old, parameter) for average, old, parameter in before]
            far = torch.stack([f for f, _ in counts]).sum()
            still = torch.stack([s for _, s in counts]).sum()
        draft.fields["still"] = Late(torch.where(far > 0, still / far, -1.0), lambda x: x if x >= 0 else None)
        draft.fields["made_at"] = self._halves.origin(before[0][0])[0]

    # -- by hand -------------------------------------------------------------------------------------------------

    def _before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._values.clear()  # addresses are told anew
        if self._session.look.is_open:
            self._loops = frozenset(frame.f_code for frame in _users())

    def before(self, operation: Operation) -> None:
        """An average in half precision is remembered as it was before it is written to."""
        if operation.name in ("mul_", "lerp_", "_foreach_lerp_", "_foreach_mul_") and self._is_free(operation):
            average = _first(operation.args[0])
            if average is not None and average.dtype in HALF and self._parameters.owner(average) is None:
                known = self._values.get(average.data_ptr())
                if known is None or known.before is None:
                    self._keep(average, _Value(0.0, 1.0, 0, None, _sample(average).clone()))

    def after(self, operation: Operation) -> None:
        method = _METHODS.get(operation.name)
        if method is not None and self._is_free(operation):
            getattr(self, method)(operation)

    def _is_free(self, operation: Operation) -> bool:
        """Neither backward's nor an optimizer's own, nor a part of a graph."""
        if operation.backward or self._parameters.updating:
            return False
        return not (torch.is_grad_enabled() and any(t.requires_grad for t in operation.tensors()))

    def _known(self, tensor: Any) -> _Value | None:
        """What is known of this value; a parameter is all of itself."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return None
        owner = self._parameters.owner(tensor)
        if owner is not None:
            return _Value(1.0, 0.0, tensor.data_ptr(), owner)
        known = self._values.get(tensor.data_ptr()) if tensor.layout == torch.strided else None
        return known if known is not None and known.elements == tensor.numel() else None

    def _keep(self, tensor: torch.Tensor, value: _Value | None) -> None:
        address = tensor.data_ptr()
        if value is None:
            self._values.pop(address, None)
            return
        value.elements = tensor.numel()
        self._values[address] = value
        self._values.move_to_end(address)
        while len(self._values) > _KEPT:
            self._values.popitem(last=False)

    def _copied(self, operation: Operation) -> None:
        source = self._known(operation.args[0])
        if isinstance(operation.out, torch.Tensor) and operation.out.data_ptr() != operation.args[0].data_ptr():
            self._keep(operation.out, source)

    def _multiplied(self, operation: Operation) -> None:
        source, factor = operation.args[0], _number(operation.args[1])
        if factor is None and isinstance(operation.args[1], torch.Tensor):
            source, factor = operation.args[1], _number(operation.args[0])
        for tensor, out in zip(_list(source), _list(operation.out), strict=False):
            known = self._known(tensor) or _Value(0.0, 1.0, 0, None)
            self._keep(out, None if factor is None else known.times(factor))

    def _scaled(self, operation: Operation) -> None:
        factor = _number(operation.args[1])
        for tensor in _list(operation.args[0]):
            if self._parameters.owner(tensor) is None:
                known = self._known(tensor) or _Value(0.0, 1.0, 0, None)
                self._keep(tensor, None if factor is None else known.times(factor))

    def _added(self, operation: Operation) -> None:
        sign = -1.0 if "sub" in operation.name else 1.0
        alpha = operation.kwargs.get("alpha", operation.args[2] if len(operation.args) > 2 else 1.0)
        alpha = _number(alpha)
        if alpha is None:
            return
        into = operation.mutates
        outs = _list(operation.args[0] if into else operation.out)
        for one, other, out in zip(_list(operation.args[0]), _list(operation.args[1]), outs, strict=False):
            if into and self._parameters.owner(one) is not None:
                continue
            self._sum(operation, one, other, sign * alpha, out)

    def _sum(
        self, operation: Operation, one: torch.Tensor, other: torch.Tensor, alpha: float, out: torch.Tensor
    ) -> None:
        left, right = self._known(one), self._known(other)
        named = left if left is not None and left.share else right
        if named is None or not named.share or one.shape != other.shape:
            self._keep(out, None)
            return
        left = left or _Value(0.0, 1.0, 0, None)
        right = right or _Value(0.0, 1.0, 0, None)
        share, old = left.share + alpha * right.share, left.old + alpha * right.old
        if 0 < share < 1 and abs(share + old - 1) < _NEAR * share and named.optimizer is not None:
            self._found(operation, named.optimizer, named.parameter, old, out, left.before, other)
            self._keep(out, None)
        else:
            self._keep(out, _Value(share, old, named.parameter, named.optimizer, left.before))

    def _interpolated(self, operation: Operation) -> None:
        weight = _number(operation.args[2])
        into = operation.mutates
        outs = _list(operation.args[0] if into else operation.out)
        for one, other, out in zip(_list(operation.args[0]), _list(operation.args[1]), outs, strict=False):
            owner = self._parameters.owner(other) or getattr(self._known(other), "optimizer", None)
            if owner is None or self._parameters.owner(one) is not None or one.shape != other.shape:
                continue
            known = self._known(one)
            self._keep(out, None)
            before = known.before if known is not None and into else None
            decay = None if weight is None else 1 - weight
            self._found(operation, owner, other.data_ptr(), decay, out, before, other)

    def _found(
        self,
        operation: Operation,
        owner: int,
        address: int,
        decay: float | None,
        out: torch.Tensor,
        before: torch.Tensor | None,
        parameter: torch.Tensor,
    ) -> None:
        if self._inside is not None:
            if decay is not None:
                self._inside.fields["decay"] = decay
            return
        at = self._line()
        average = self._average((at, owner))
        if average.draft is not None and average.first != address:
            average.draft.fields["optimizers"][owner] += 1
            return
        average.first = address
        average.updates += 1
        average.draft = self._session.stream.emit(
            AverageUpdated,
            at=at,
            average=average.number,
            optimizers={owner: 1},
            how=operation.name,
            decay=decay,
            dtype=str(out.dtype).removeprefix("torch."),
        )
        if before is not None and _is_due(average.updates):
            self._stood(average.draft, [(out, before, parameter)])

    def _average(self, key: Any) -> _Average:
        return self._averages.setdefault(key, _Average(len(self._averages) + 1))

    def _line(self) -> Place | None:
        """The line in the function that trains: where a helper is called, not the arithmetic inside it."""
        for frame in _users():
            if frame.f_code in self._loops:
                return place(frame)
        return self._session.place()


_METHODS = {
    "mul": "_multiplied",
    "_foreach_mul": "_multiplied",
    "mul_": "_scaled",
    "_foreach_mul_": "_scaled",
    "add": "_added",
    "add_": "_added",
    "sub": "_added",
    "sub_": "_added",
    "_foreach_add": "_added",
    "_foreach_add_": "_added",
    "_foreach_sub": "_added",
    "_foreach_sub_": "_added",
    "lerp": "_interpolated",
    "lerp_": "_interpolated",
    "_foreach_lerp": "_interpolated",
    "_foreach_lerp_": "_interpolated",
    "clone": "_copied",
    "_to_copy": "_copied",
}


def _users() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code):
            yield frame
        frame = frame.f_back


def _first(value: Any) -> torch.Tensor | None:
    return next(iter(_list(value)), None)


def _list(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def _number(value: Any) -> float | None:
    """A Python number, or a 0-dim tensor on the CPU; nothing is fetched from another device."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type == "cpu" and not value.is_complex():
        return float(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, (int, float)) for v in value):
        return float(value[0]) if len(set(value)) == 1 else None
    return None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:_SAMPLE]


def _still(average: torch.Tensor, old: torch.Tensor, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    now, goal = _sample(average), _sample(parameter).to(average.device, torch.float32)
    far = (goal - old.float()).abs() > _FAR[average.dtype] * old.float().abs()
    return far.sum().float(), (far & (now == old)).sum().float()


def _is_due(number: int) -> bool:
    return number <= _DENSE or number % _DENSE == 0


def _dtype(module: torch.nn.Module) -> str:
    return next((str(p.dtype).removeprefix("torch.") for p in module.parameters()), "float32")
