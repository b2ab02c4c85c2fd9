"""The session of a run that is compared: the ordinary watch, whose events are folded into one line an update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Event, HalfParameters, Place, SchedulerStepped, UpdateTraced
from halfstep.events.contributions import Contribution
from halfstep.launch import Enough
from halfstep.probe.runs.side import is_told
from halfstep.record.columns import Columns
from halfstep.record.history import History, Row
from halfstep.watch.session import Session

if TYPE_CHECKING:
    from halfstep.probe.runs.side import Teller

HALF = ("float16", "bfloat16")


class Traced(Session):
    """Tells each update to ``teller``; ends the run after ``attempts`` attempted updates, applied or not."""

    def __init__(self, teller: Teller, attempts: int | None = None) -> None:
        super().__init__(beside=True)
        self._teller = teller
        self._most = attempts
        self._attempts = 0
        self.history: Curve = Curve(teller)

    def start(self) -> Traced:
        super().start()
        self._hear_metrics()
        return self

    def applied(self, draft_at: Place | None) -> None:
        self._attempts += 1
        self._teller.reached(self._attempts)
        super().applied(draft_at)
        if self._most is not None and self._attempts >= self._most:
            raise Enough

    def _hear_metrics(self) -> None:
        """The numbers that a script gives to halfstep's own manager."""
        from halfstep.engine.manager import MixedPrecisionManager

        def logged(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, value in kwargs.items():
                number = number_of(value)
                if number is not None:
                    self._teller.tell("metric", name=name, value=number, attempts=self._attempts)

        self.patches.around(MixedPrecisionManager, "log", None, logged)


class _Last(Columns[Row]):
    """Keeps nothing but the last row."""

    last: Row | None = None

    def append(self, row: Row, *, anomaly: bool = False) -> None:
        self.last = row


class Curve(History):
    """Folds events as `History` does and tells each row, with what was traced of the update."""

    def __init__(self, teller: Teller) -> None:
        super().__init__()
        self.rows: _Last = _Last()
        self._teller = teller
        self._count = 0
        self._contributions = 0
        self._traced: dict[int, UpdateTraced] = {}
        self._positions: dict[int, int] = {}  # optimizer -> its scheduler's position
        self._halves: set[str] = set()

    def see(self, event: Event) -> None:
        match event:
            case Contribution():
                self._contributions += 1
                for name in (event.autocast, *(event.halves or ()), event.dtype):
                    self._half(name)
            case UpdateTraced():
                self._traced[event.optimizer] = event
            case SchedulerStepped() if event.position is not None:
                self._positions[event.optimizer or 0] = event.position
            case HalfParameters():
                for name in event.dtypes:
                    self._half(name)
                self._teller.tell("half parameters", dtypes=dict(event.dtypes), name=event.name)
            case _:
                pass
        super().see(event)
        row, self.rows.last = self.rows.last, None
        if row is not None:
            self._tell(row)

    def _half(self, name: str | None) -> None:
        if name in HALF and name not in self._halves:
            self._halves.add(name)
            self._teller.tell("half", dtype=name)

    def _tell(self, row: Row) -> None:
        self._count += 1
        traced = self._traced.pop(row.optimizer, None)
        if not is_told(self._count):
            return
        fields: dict[str, Any] = {
            "optimizer": row.optimizer,
            "micro": self._contributions,
            "attempted": row.attempted,
            "applied": row.applied,
            "outcome": row.outcome,
            "loss": row.loss,
            "norm": row.norm,
            "scale": row.scale,
            "lr": row.lr,
            "position": self._positions.get(row.optimizer, self._positions.get(0)),
        }
        if traced is not None:
            fields.update(random=traced.random, data=(traced.whole, traced.real, traced.size))
            if traced.norms:
                fields.update(layers=dict(traced.norms), norm=math.hypot(*traced.norms.values()))
            if traced.weights:
                fields["weights"] = dict(traced.weights)
        self._teller.tell("update", **fields)


def number_of(value: Any) -> float | None:
    """A metric as a number; None for what is none."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None
