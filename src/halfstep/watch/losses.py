"""A loss between its reduction and the root of backward: which line made it, what it was divided by, who read it.

The nodes there hold one number each. While operators are looked at, each such node's line is remembered by autograd's
sequence number, and a value that goes to the host, or into a running total, is traced to the node that made it.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Division, LossRead, Place
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.place import by_engine
from halfstep.watch.sources import divides_by_count
from halfstep.watch.stream import on_host
from halfstep.weigh.nodes import LOSSES, PRODUCTS, QUOTIENTS, REDUCTIONS, children, constant, name_of, shape_of

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_KEPT = 256  # lines, values and reads remembered
_LINKS = 16  # nodes of one number between the root and the reduction
_READERS = {"_local_scalar_dense": "item", "add_": "add_", "add": "add", "stack": "stack", "cat": "cat"}
_sequence = getattr(torch._C._autograd, "_get_sequence_nr", None)


@dataclass(slots=True)
class Chain:
    """The nodes of one number from a root down: (sequence number, factor from its value to the root's)."""

    links: list[tuple[int, float]] = field(default_factory=list)
    divisors: list[tuple[float, int, bool]] = field(default_factory=list)  # number, sequence number, by its inverse
    reduction: int | None = None


class Losses:
    """The sight of losses; as a lens it remembers lines and reads while operators are looked at."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lines: OrderedDict[int, Place | None] = OrderedDict()  # sequence number -> line
        self._values: OrderedDict[int, int] = OrderedDict()  # address -> sequence number of the node that filled it
        self._reads: OrderedDict[int, tuple[int, str, Place | None]] = OrderedDict()  # not yet a loss's
        self._count = itertools.count()
        self._known: OrderedDict[int, tuple[int, float]] = OrderedDict()  # sequence number -> contribution, factor
        self._seen: OrderedDict[int, tuple[Place | None, tuple[Place | None, ...]]] = OrderedDict()  # by route

    def install(self, patches: Patches) -> None:
        if self not in self._session.look.lenses and _sequence is not None:
            self._session.look.lenses.append(self)

    # -- at backward ---------------------------------------------------------------------------------------------

    def describe(self, root: torch.Tensor, number: int, route: int) -> tuple[Place | None, tuple[Division, ...]]:
        """Where the loss was reduced, and the divisions of it since; to be called while its graph is there."""
        if not self._session.look.is_open:
            self._values.clear()  # addresses are told anew
            self._reads.clear()
        chain = walk(root.grad_fn)
        for sequence, factor in chain.links:
            _keep(self._known, sequence, (number, factor))
        for key, (sequence, how, at) in list(self._reads.items()):
            if sequence in self._known and self._known[sequence][0] == number:
                del self._reads[key]
                self._emit(sequence, how, at)
        loss_at = None if chain.reduction is None else self._lines.get(chain.reduction)
        places = tuple(self._lines.get(sequence) for _, sequence, _ in chain.divisors)
        old = self._seen.get(route)
        if old is not None and len(old[1]) == len(places):  # not looked at this time: the same route, the same lines
            loss_at = loss_at or old[0]
            places = tuple(new or known for new, known in zip(places, old[1], strict=True))
        _keep(self._seen, route, (loss_at, places))
        pairs = zip(chain.divisors, places, strict=True)
        return loss_at, tuple(Division(by, place, inverse, _counts(place, by)) for (by, _, inverse), place in pairs)

    # -- the lens ------------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        if operation.backward:
            return
        out = operation.out
        how = _READERS.get(operation.name)
        if how is not None and (how == "item" or (isinstance(out, torch.Tensor) and not out.requires_grad)):
            self._read(operation, how)
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, torch.Tensor) and result.dim() == 0 and result.is_floating_point():
                self._made(operation, result)

    def _made(self, operation: Operation, result: torch.Tensor) -> None:
        """Inside a dispatch the node is there, its number is the last one given, the result does not show it yet."""
        tensors = operation.tensors()
        address = result.data_ptr()
        if operation.name != "lift_fresh" and any(t.data_ptr() == address for t in tensors):
            return  # a view of a value that is known already, or that value changed in place
        if _sequence is None or not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            self._values.pop(address, None)
            return
        sequence = _sequence() - 1
        _keep(self._lines, sequence, operation.at)
        _keep(self._values, address, sequence)

    def _read(self, operation: Operation, how: str) -> None:
        if by_engine():
            return  # for its own account, which has every micro-batch
        for tensor in operation.tensors():
            if tensor.dim() or not tensor.is_floating_point():
                continue
            node: Any = tensor.grad_fn
            sequence = node._sequence_nr() if node is not None else self._values.get(tensor.data_ptr())
            if sequence is None or (how != "item" and tensor.requires_grad):
                continue
            if sequence in self._known:
                self._emit(sequence, how, operation.at)
            else:
                _keep(self._reads, next(self._count), (sequence, how, operation.at))

    def _emit(self, sequence: int, how: str, at: Place | None) -> None:
        number, factor = self._known[sequence]
        multiplied = how == "item" and at is not None and _is_multiplied(at.file, at.line)
        self._session.stream.emit(LossRead, at=at, contribution=number, factor=factor, how=how, multiplied=multiplied)


def walk(node: Any) -> Chain:
    """The chain below a root of backward: as far as every node has one number and one input."""
    chain = Chain()
    factor = 1.0
    while node is not None and len(chain.links) < _LINKS and not shape_of(node):
        name = name_of(node)
        chain.links.append((node._sequence_nr(), factor))
        inputs = children(node)
        if name in LOSSES or (name in REDUCTIONS and inputs and shape_of(*inputs[0][:2])):
            chain.reduction = chain.links[-1][0]
            break
        if len(inputs) != 1:
            chain.reduction = chain.links[-1][0]  # a sum of terms: where they come together
            break
        if name in PRODUCTS or name in QUOTIENTS:
            number = _number(node)
            if name in QUOTIENTS and number is not None and inputs[0][2] == 0:
                chain.divisors.append((number, chain.links[-1][0], False))
                factor = factor / number if number else float("nan")
            elif number is not None and name in PRODUCTS:
                if 0 < number < 1 and abs(round(1 / number) - 1 / number) < 1e-6:
                    chain.divisors.append((float(round(1 / number)), chain.links[-1][0], True))
                factor *= number
            else:
                factor = float("nan")
        node = inputs[0][0]
    return chain


def _counts(at: Place | None, by: float) -> bool | None:
    return None if at is None else divides_by_count(at.file, at.line, by)


@functools.lru_cache(maxsize=1024)
def _is_multiplied(file: str, line: int) -> bool:
    """Whether the value read there is put right at once: `loss.item() * accumulation_steps`."""
    return (
        re.search(r"(item\(\)|\bfloat\(.*\))\s*\*|\*\s*[\w.]*(item\(\)|float\()", linecache.getline(file, line))
        is not None
    )


def _number(node: Any) -> float | None:
    """The other operand, where it is one number that lies on the host."""
    other = constant(node)
    if not isinstance(other, torch.Tensor) or other.numel() != 1 or other.device.type != "cpu":
        return None
    return on_host(other)


def _keep(memory: OrderedDict[int, Any], key: int, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _KEPT:
        memory.popitem(last=False)
