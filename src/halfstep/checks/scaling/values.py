"""Values that carry the scale where they should not: statistics read, gradients in a loss."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.scaling.carried import ScaleReads, carried
from halfstep.checks.story import Story
from halfstep.events import (
    Attempt,
    Clipped,
    Contribution,
    Event,
    Finding,
    GradientsCleared,
    GradientsRead,
    PenaltyMixed,
    Place,
    ScaleRead,
)


class ScaledGradientsRead(BaseCheck):
    """A norm or maximum of gradients that reached the script while they carried the scale.

    A script may divide the number itself: one that asks for the scale around the reading is believed.
    """

    rules = ("scaled-gradients-read",)

    def __init__(self) -> None:
        self._reads = ScaleReads()
        self._waiting: list[tuple[Finding, bool]] = []
        self._converted: set[tuple[str, int]] = set()
        self._confirmed: set[tuple[str, int]] = set()
        self._looked = False

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case GradientsRead():
                self._read(event, event.how, event.optimizers, story)
            case Clipped() if math.isinf(event.limit) and not event.by_hand:
                self._read(event, "clip_grad_norm_", event.optimizers, story)
            case Contribution():
                self._looked = self._looked or event.halves is not None
            case Attempt() | GradientsCleared():
                yield from self._decide()
            case ScaleRead():
                if event.how == "computing" or (event.how == "plain" and self._waiting):
                    self._reads.see(event)
                    self._convert()
            case _:
                pass
        self._reads.see(event)

    def _read(self, event: GradientsRead | Clipped, how: str, owners: Iterable[int], story: Story) -> None:
        if isinstance(event, GradientsRead) and event.power is not None:
            scale, certain = event.scale, True
        else:
            now = next((c for c in (carried(story.optimizer(i)) for i in owners) if c.scaled), None)
            scale, certain = (now.scale, False) if now is not None else (None, False)
        if scale is None or scale == 1.0:
            return
        value = event.value if isinstance(event, GradientsRead) else event.norm
        use = event.use if isinstance(event, GradientsRead) else None
        told = f" ({value:.4g})" if value is not None and math.isfinite(value) else ""
        finding = Finding(
            rule="scaled-gradients-read",
            severity="warning",
            at=event.at,
            message=(
                f"a statistic of the gradients{told} was {'compared' if use == 'compared' else 'read'} while they were "
                f"multiplied by the loss scale {scale:g}: it is that many times too large, and moves with the scale"
            ),
            evidence={"scale": scale, "value": value, "how": how, "use": use},
            fix="scaler.unscale_(optimizer)  # before measuring (or divide the number by scaler.get_scale())",
        )
        self._waiting.append((finding, certain))
        if self._reads.known_at(event.at):
            self._convert()

    def _convert(self) -> None:
        self._converted.update(_key(f.at) for f, _ in self._waiting)
        self._waiting.clear()

    def _decide(self) -> Iterable[Finding]:
        waiting, self._waiting = self._waiting, []
        for finding, certain in waiting:
            key = _key(finding.at)
            if key in self._converted:
                continue
            if certain:
                self._confirmed.add(key)
            # where operators were looked at, a place that was never seen to let the value out is not told
            if certain or key in self._confirmed or not self._looked:
                yield finding

    def end(self, story: Story) -> Iterable[Finding]:
        return self._decide()


def _key(at: Place | None) -> tuple[str, int]:
    return (at.file, at.line) if at else ("", 0)


class ScaledGradientsInLoss(BaseCheck):
    """Gradients taken from a scaled output, added to a loss without division by the scale."""

    rules = ("scaled-gradients-in-loss",)

    def __init__(self) -> None:
        self._reads = ScaleReads()

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        self._reads.see(event)
        if not isinstance(event, PenaltyMixed) or event.scale in (None, 1.0) or self._reads.computing():
            return
        where = f" (line {event.mixed_at.line})" if event.mixed_at else ""
        power = "" if event.power == 1 else f" to the power {event.power:g}"
        yield Finding(
            rule="scaled-gradients-in-loss",
            severity="error",
            at=event.at,
            message=(
                f"gradients taken here carry the loss scale {event.scale:g}{power} and met values that do not, in "
                f"{event.operator}{where}: the penalty moves with the scale"
            ),
            evidence={"scale": event.scale, "power": event.power, "operator": event.operator},
            fix="inv = 1.0 / scaler.get_scale(); grads = [g * inv for g in grads]",
        )
