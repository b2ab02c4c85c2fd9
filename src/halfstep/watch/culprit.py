"""Who made the first non-finite value that mattered, forward or backward.

In a micro-batch that is looked at, the largest magnitude of every operator's output is kept (on its device), with the
operators whose outputs it read. After backward the trace starts at what mattered, the loss or a gradient, and follows
non-finite inputs upwards to the operator whose own inputs were finite: so masks filled with -inf and memory nobody
read name nobody. The line of a gradient operator is that of its forward operator: both bear one sequence number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep.events import NonFinite, Place
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.stream import read

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_KEPT = 20_000  # operators and lines remembered, when no backward comes
_UNWRITTEN = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"))
INPUT = "input"


class Made(NamedTuple):
    """One operator's output: how large it was, and the outputs it was made of (by their number)."""

    operator: str
    node: str | None
    at: Place | None
    dtype: torch.dtype
    peak: torch.Tensor
    parents: tuple[int, ...]


class Culprit:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._made: list[Made] = []
        self._writer: dict[int, int] = {}  # storage -> number of what was last written to it
        self._lines: dict[int, Place | None] = {}  # autograd sequence number -> line of the forward operator
        self._sequence = 0

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    # -- while looking -------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        """What an operator overwrites must be known before it does."""
        self._inputs(operation, frozenset())

    def after(self, operation: Operation) -> None:
        outs = [t for t in _flat(operation.out) if t.is_floating_point() and t.layout is torch.strided and t.numel()]
        node = torch._C._current_autograd_node()
        if node is None:
            self._note_line(operation)
        if not outs:
            return
        name = operation.name
        written = frozenset(_storage(t) for t in outs)
        if name in _UNWRITTEN:
            for key in written:
                self._writer.pop(key, None)
            return
        if not operation.mutates and any(_storage(t) in written for t in _strided(operation.tensors())):
            return  # a view: what was written to its storage is known by the storage
        parents = self._inputs(operation, written)
        at, label = operation.at, None
        if node is not None:
            label = node.name()
            at = self._lines.get(node._sequence_nr(), at)
        if len(self._made) > _KEPT:
            self.forget()
            parents = ()
        for tensor in outs:
            self._writer[_storage(tensor)] = len(self._made)
            self._made.append(Made(name, label, at, tensor.dtype, _peak(tensor), parents))

    def _note_line(self, operation: Operation) -> None:
        number = torch.autograd._get_sequence_nr()
        if number == self._sequence:
            return
        for made in range(max(self._sequence, number - 8), number):
            self._lines[made] = operation.at
        self._sequence = number
        while len(self._lines) > _KEPT:
            del self._lines[next(iter(self._lines))]

    def _inputs(self, operation: Operation, written: frozenset[int]) -> tuple[int, ...]:
        parents = []
        for tensor in _strided(operation.tensors()):
            key = _storage(tensor)
            number = self._writer.get(key)
            if number is None and key not in written and tensor.is_floating_point() and tensor.numel():
                number = self._writer[key] = len(self._made)
                self._made.append(Made(INPUT, None, operation.at, tensor.dtype, _peak(tensor), ()))
            if number is not None:
                parents.append(number)
        return tuple(parents)

    def line(self, node: Any) -> Place | None:
        """The line of the forward operator that this autograd node belongs to, where it was looked at."""
        return self._lines.get(node._sequence_nr())

    # -- after backward ------------------------------------------------------------------------------------------

    def trace(self, roots: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
        """Emit who made the non-finite value that reached the loss or a gradient, if one did; forget the rest."""
        if not self._made:
            return
        peaks = read([m.peak for m in self._made])
        if not all(map(math.isfinite, peaks)):
            ends = [self._writer.get(_storage(t)) for t in _strided(roots)]
            if not any(n is not None and not math.isfinite(peaks[n]) for n in ends):
                ends = [self._writer.get(_storage(t)) for t in _strided(gradients)]
            bad = [n for n in ends if n is not None and not math.isfinite(peaks[n])]
            if bad:
                self._tell(self._origin(min(bad), peaks), peaks)
        self.forget()

    def _origin(self, number: int, peaks: list[float]) -> int:
        while True:
            bad = [p for p in self._made[number].parents if p < number and not math.isfinite(peaks[p])]
            if not bad:
                return number
            number = min(bad)

    def _tell(self, number: int, peaks: list[float]) -> None:
        made = self._made[number]
        inputs = [abs(peaks[p]) for p in made.parents]
        self._session.stream.emit(
            NonFinite,
            at=made.at,
            operator=made.operator,
            phase="forward" if made.node is None else "backward",
            node=made.node,
            value="nan" if math.isnan(peaks[number]) else "inf",
            dtype=str(made.dtype).removeprefix("torch."),
            peak=max(inputs) if inputs else None,
        )

    def forget(self) -> None:
        self._made.clear()
        self._writer.clear()


def _peak(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        peak: torch.Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf"))
    return peak


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _strided(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if t.layout is torch.strided]


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []
