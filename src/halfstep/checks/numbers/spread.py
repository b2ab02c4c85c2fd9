"""Where one non-finite value spreads: into running statistics, by clipping into every gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import Clipped, Event, Finding, GradientsEdited, NonFinite, StatisticsPoisoned

_KEPT = 64
_FACTORS = ("mul_", "div_", "_foreach_mul_", "_foreach_div_")


class PoisonedStatistics(BaseCheck):
    """Running statistics took in a batch whose update was not applied: the weights are finite, they are not."""

    rules = ("poisoned-running-statistics",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if not isinstance(event, StatisticsPoisoned) or event.weights is False:
            return
        names = " and ".join(event.buffers)
        yield Finding(
            rule="poisoned-running-statistics",
            severity="error",
            at=event.at,
            update=story.attempted or None,
            message=(
                f"{names} of {event.module} are not finite: the forward took in a batch whose update was skipped; "
                f"training does not use them, evaluation does from here on"
            ),
            evidence={"module": event.module, "buffers": list(event.buffers), "micro_batch": event.micro},
            fix="keep such a batch away (clamp or drop it), or restore the buffers when an update is skipped",
            module=event.module,
            operator="batch_norm",
            phase="forward",
        )


class ClipSpreads(BaseCheck):
    """Some gradients were not finite; clipping by their common norm made all of them so, and nothing skipped that."""

    rules = ("clip-spreads-nonfinite",)

    def __init__(self) -> None:
        self._spoiled: dict[int, tuple[int, int]] = {}  # contribution -> gradients not finite, of how many

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, NonFinite) and event.spoiled is not None and event.gradients:
            self._spoiled[event.micro] = (event.spoiled, event.gradients)
            if len(self._spoiled) > _KEPT:
                del self._spoiled[next(iter(self._spoiled))]
        return ()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        if not update.applied or update.attempt.scaler is not None:
            return
        for event in update.between:
            if not isinstance(event, (Clipped, GradientsEdited)) or not any(c.seq < event.seq for c in update.live):
                continue
            bad, total = self._counts(event, update)
            if bad is None or total is None or 2 * bad > total:
                continue  # they were lost before
            value, limit = (event.norm, event.limit) if isinstance(event, Clipped) else (None, None)
            norm = f"the norm is {value}" if value is not None else "so is their norm"
            yield Finding(
                rule="clip-spreads-nonfinite",
                severity="error",
                at=event.at,
                update=update.number,
                message=(
                    f"{bad} of {total} gradients were not finite; {norm}, clipping by it made every gradient "
                    f"{'NaN or zero' if value == math.inf else 'NaN'}, and the update was applied"
                ),
                evidence={"nonfinite": bad, "gradients": total, "norm": value, "limit": limit},
                fix="norm = clip_grad_norm_(...); optimizer.step() only if torch.isfinite(norm)",
            )
            return

    def _counts(self, event: Clipped | GradientsEdited, update: Update) -> tuple[int | None, int | None]:
        """How many gradients were not finite before, of how many; (None, None) where nothing spread."""
        if isinstance(event, Clipped):
            if event.kind != "norm" or not (_wrong(event.norm) or (event.norm is None and event.by_hand)):
                return None, None
            if event.nonfinite is not None:
                return event.nonfinite, event.tensors
        elif event.factor is not None or event.operator not in _FACTORS or not _wrong(update.attempt.norm):
            return None, None  # multiplied by hand, by a number that was one
        return next((self._spoiled[c.number] for c in update.live if c.number in self._spoiled), (None, None))


def _wrong(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
