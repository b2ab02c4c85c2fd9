"""The curve of a run, update by update, from its events: what a report draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfstep.events import (
    Attempt,
    Clipped,
    Contribution,
    Event,
    GradientsMeasured,
    ScalerMade,
    ScaleUpdated,
    Unscaled,
)
from halfstep.record.columns import Columns


@dataclass(frozen=True, slots=True)
class Row:
    """One attempted update. ``loss``: mean of its contributions' losses as passed to backward, the scale divided out.

    ``norm``: of the gradients before clipping (else as the optimizer saw them), the scale divided out. None: not seen.
    """

    attempted: int
    applied: int
    outcome: str
    optimizer: int
    micro_batches: int
    loss: float | None = None
    norm: float | None = None
    scale: float | None = None
    lr: float | None = None


class History:
    """Fold events with `see`; read `rows`, and `gradients`: the last half-precision gradients that were measured."""

    def __init__(self) -> None:
        self.rows: Columns[Row] = Columns()
        self.gradients: GradientsMeasured | None = None
        self._attempted = 0
        self._applied = 0
        self._losses: list[float] = []
        self._micro = 0
        self._norm: float | None = None
        self._scale: float | None = None
        self._carried = 1.0  # the loss scale that the gradients still carry

    def see(self, event: Event) -> None:
        match event:
            case Contribution():
                self._micro += 1
                if event.loss is not None and len(self._losses) < 4096:
                    self._losses.append(event.loss / (event.scale or 1.0))
                self._carried = event.scale or 1.0
            case Unscaled():
                self._carried = 1.0
            case Clipped(kind="norm"):
                self._norm = None if event.norm is None else event.norm / self._carried
            case ScalerMade():
                self._scale = event.scale if event.enabled else None
            case ScaleUpdated():
                self._scale = event.after
            case Attempt():
                self._attempt(event)
            case GradientsMeasured():
                self.gradients = event
            case _:
                pass

    def _attempt(self, event: Attempt) -> None:
        self._attempted += 1
        self._applied += event.outcome == "applied"
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        strange = event.outcome != "applied" or (loss is not None and not math.isfinite(loss))
        norm = self._norm if self._norm is not None else event.norm
        row = Row(
            self._attempted,
            self._applied,
            event.outcome,
            event.optimizer,
            self._micro,
            loss=loss,
            norm=norm,
            scale=self._scale,
            lr=event.lr,
        )
        self.rows.append(row, anomaly=strange)
        self._losses, self._micro, self._norm = [], 0, None
