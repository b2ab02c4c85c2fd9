"""Running totals in half precision: does what is added still change them?

A total is what the same line adds to again and again. BF16 has 8 significant bits: 256 + 1 is 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Place, TotalStalled
from halfstep.watch.gradients import Gradients
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.provenance import Origin, Provenance
from halfstep.watch.ranges import HALF

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_ADDS = frozenset(("add", "add_"))
_ELEMENTS = 4096  # of a total
_RUN = 2  # additions of one line to its own result that make it a total
_SURE = 3  # additions that changed nothing
_LOST = 0.005  # what was lost, relative to the total
_LATELY = 8
_LINES = 256


@dataclass(slots=True)
class _Line:
    additions: int = 0
    stalled: int = 0
    lost: float = 0.0
    told: int = 0


class Totals:
    def __init__(self, session: Session, gradients: Gradients, provenance: Provenance) -> None:
        self._session = session
        self._gradients = gradients
        self._provenance = provenance
        self._lines: dict[Place | None, _Line] = {}
        self._old: torch.Tensor | None = None

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    def before(self, operation: Operation) -> None:
        self._old = None
        total = operation.args[0] if operation.args else None
        if operation.name == "add_" and not operation.backward and isinstance(total, torch.Tensor) and _small(total):
            self._old = total.detach().clone()

    def after(self, operation: Operation) -> None:
        old, self._old = self._old, None
        origin = self._provenance.now
        if origin is None or origin.name not in _ADDS or operation.backward or self._gradients.busy:
            return
        out = operation.out
        if not _small(out) or not origin.finite or len(operation.args) < 2:
            return
        if origin.grad and out.numel() > 1:
            return  # a stream of activations: each addition is one of its own
        former = self._former(operation, origin)
        line = self._lines.get(origin.at)
        run = (former[1].facts.get("run", 1) + 1) if former is not None else 1
        origin.facts["run"] = run
        if run < _RUN and line is None:
            return
        if line is None:
            if len(self._lines) >= _LINES:
                return
            line = self._lines[origin.at] = _Line()
        total, other = operation.args[0], operation.args[1]
        if former is not None and former[0] == 1 and isinstance(other, torch.Tensor):
            total, other = other, total  # loss + total
        self._added(operation, line, out, old if old is not None else total, other)

    def _former(self, operation: Operation, origin: Origin) -> tuple[int, Origin] | None:
        """Which of the two was made by the same line before."""
        for index, value in enumerate(operation.args[:2]):
            if not isinstance(value, torch.Tensor):
                continue
            for source in origin.inputs:
                same = source.at == origin.at and source.name in _ADDS and source.number < origin.number
                if same and (source.key == origin.key or self._provenance.of(value) is source):
                    return index, source
        return None

    def _added(self, operation: Operation, line: _Line, out: torch.Tensor, old: torch.Tensor, other: Any) -> None:
        line.additions += 1
        amount = torch.as_tensor(other).double() * operation.kwargs.get("alpha", 1)
        amount = amount.broadcast_to(out.shape)
        if out.numel() > 1 and not (bool((amount >= 0).all()) or bool((amount <= 0).all())):
            return
        adds = amount != 0
        stalled = adds & (out == old)
        if not bool(adds.any()) or float(stalled.sum()) <= 0.5 * float(adds.sum()):
            return
        line.stalled += 1
        size = float(out.double().abs().amax())
        line.lost += float(amount[stalled].abs().mean())
        self._session.look.want()
        sure = line.stalled >= _SURE and 2 * line.stalled >= min(line.additions, _LATELY)
        if sure and line.stalled >= 2 * line.told and (line.lost >= _LOST * size or line.stalled >= _LATELY):
            line.told = line.stalled
            self._session.stream.emit(
                TotalStalled,
                at=operation.at,
                dtype=str(out.dtype).removeprefix("torch."),
                total=size,
                added=line.lost,
                times=line.stalled,
                additions=line.additions,
                elements=out.numel(),
            )


def _small(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in HALF
        and value.numel() <= _ELEMENTS
        and not isinstance(value, torch.nn.Parameter)
    )
