"""The first operator of a pass whose finite inputs gave a non-finite output that mattered: found by a look of its own.

The search is the doctor's (`halfstep.watch.culprit`); here it sees a single pass that nobody watches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.events import Event, NonFinite, Place
from halfstep.probe.micro_batch.modules import plain_name
from halfstep.probe.micro_batch.passes import Pass
from halfstep.watch.culprit import Culprit
from halfstep.watch.exact import kind_of
from halfstep.watch.gradients import Gradients
from halfstep.watch.look import Operation
from halfstep.watch.ranges import HALF, measurable
from halfstep.watch.session import Session
from halfstep.watch.underflow import Underflow


@dataclass(frozen=True)
class Overflow:
    """Where a non-finite value was made.

    ``module``: its name in the model ("" is the model itself, None: outside of it, in the loss). ``operator``: torch's
    name of the operator, of the autograd node in a backward. ``peak``: the largest magnitude among its inputs.
    ``limit``: the largest number of ``dtype``. ``exact``: the largest magnitude that FP32 gives for the same inputs,
    where it could be computed. ``scale``: the loss scale its gradients carried, in a backward. ``cause``: "operator"
    unless the doctor has a better word ("input", "constant", "masked", …). ``hidden_by``: the operator that made
    finite, and wrong, values of it.
    """

    module: str | None
    operator: str
    phase: str
    at: Place | None
    value: str
    dtype: str
    peak: float | None
    limit: float | None
    exact: float | None
    scale: float | None
    cause: str
    hidden_by: str | None

    @property
    def by_scale_alone(self) -> bool:
        """Whether the gradient would fit if the loss scale were lower."""
        if self.phase != "backward" or self.exact is None or not self.scale or self.limit is None:
            return False
        return self.exact / self.scale <= self.limit

    @property
    def by_range(self) -> bool:
        """Whether FP32 has room for the value."""
        return self.exact is not None and math.isfinite(self.exact)

    def __str__(self) -> str:
        where = "outside the model" if self.module is None else f"in {self.module or 'the model itself'}"
        line = f" at {self.at.file}:{self.at.line}" if self.at is not None else ""
        name = f"the cast to {self.dtype}" if self.operator in ("_to_copy", "copy_") else self.operator
        words = f"{name} {where}{line}, {self.phase}"
        if self.peak is not None:
            words += f": largest input {self.peak:.4g}"
        if self.by_range:
            words += f", in FP32 up to {self.exact:.4g}, {self.dtype} ends at {self.limit:.4g}"
        elif self.exact is not None:
            words += ", not finite in FP32 either"
        return words + (f"; {self.hidden_by} hid it" if self.hidden_by else "")

    def as_dict(self) -> dict[str, Any]:
        at = None if self.at is None else {"file": self.at.file, "line": self.at.line}
        return {**asdict(self), "at": at, "by_scale_alone": self.by_scale_alone, "by_range": self.by_range}


class _Stream:
    """Takes what the search emits; nothing of it goes into a record."""

    micro = 0

    def __init__(self) -> None:
        self.told: list[NonFinite] = []

    def emit(self, kind: type[Event], /, *, at: Place | None = None, **fields: Any) -> None:
        if kind is NonFinite:
            self.told.append(NonFinite(seq=0, at=at, **fields))


class _Peaks:
    """A lens: the largest gradient that was held in half precision."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        # Views of what was saved are no gradients, nor is what a checkpoint computes again, with gradients on.
        if operation.backward and not torch.is_grad_enabled() and not kind_of(operation.func).view:
            outs = [t for t in measurable(operation.out) if t.dtype in HALF]
            self._seen += [torch.linalg.vector_norm(t.detach().float(), math.inf) for t in outs]

    def taken(self) -> float:
        seen, self._seen = self._seen, []
        return float(torch.stack([t.cpu() for t in seen]).max()) if seen else 0.0


class Look:
    """The sight of one half pass. After it: `overflow`, `peak` and `underflow`.

    ``peak``: the largest half-precision gradient, multiplied by the loss scale as it was. ``underflow``: the operator
    whose FP16 result lost most of its elements to zero, and their share, where one lost any.
    """

    def __init__(self, model: nn.Module) -> None:
        session = Session()
        self._stream = _Stream()
        session.stream = cast(Any, self._stream)
        self._look = session.look
        self._culprit = Culprit(session, Gradients(session), only_culprits=True)
        names = {id(module): plain_name(name) for name, module in model.named_modules()}
        self._culprit.paths.told(model, names)
        self._known = set(names.values())
        self._peaks = _Peaks()
        self._underflow = Underflow(session)
        self._look.lenses.append(self._peaks)
        self._culprit.install(session.patches)
        self._underflow.install(session.patches)
        self.overflow: Overflow | None = None
        self.peak = 0.0
        self.underflow: tuple[float, str] | None = None

    @contextlib.contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        with self._open(backward=False):
            yield

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        with self._open(backward=True):
            yield

    @contextlib.contextmanager
    def _open(self, *, backward: bool) -> Iterator[None]:
        self._look.backward = backward
        self._look.open()
        try:
            yield
        finally:
            self._look.close()

    def judge(self, seen: Pass) -> None:
        """Search, once the pass is over."""
        scale = torch.tensor(seen.scale) if seen.scale != 1.0 else None
        try:
            self._culprit.trace([seen.root], seen.gradients.values(), scale)
        finally:
            self._culprit.forget()
        self.peak, self.underflow = self._peaks.taken(), self._underflow.taken()
        told = self._stream.told
        self.overflow = self._overflow(told[0]) if told else None

    def _overflow(self, event: NonFinite) -> Overflow:
        return Overflow(
            event.module if event.module in self._known else None,
            event.node or event.operator,
            event.phase,
            event.at,
            event.value,
            event.dtype,
            event.peak,
            event.limit,
            event.exact,
            event.scale if event.phase == "backward" else None,
            event.cause,
            event.absorbed,
        )
