"""Where one non-finite value spreads: into running statistics, by clipping into every gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import Clipped, Event, Finding, StatisticsPoisoned


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

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        if not update.applied or update.attempt.scaler is not None:
            return
        began = min((c.seq for c in update.live), default=0)  # what a group thrown away before it saw is not told
        for event in update.between:
            if not isinstance(event, Clipped) or event.kind != "norm" or not _wrong(event.norm) or event.seq < began:
                continue
            bad, total = event.nonfinite, event.tensors
            if bad is None or total is None or 2 * bad > total:
                continue  # they were lost before
            spread = "NaN" if math.isnan(event.norm or 0.0) else "zero or NaN"
            yield Finding(
                rule="clip-spreads-nonfinite",
                severity="error",
                at=event.at,
                update=update.number,
                message=(
                    f"{bad} of {total} gradients were not finite; the norm is {event.norm}, clipping by it made every "
                    f"gradient {spread}, and the update was applied"
                ),
                evidence={"nonfinite": bad, "gradients": total, "norm": event.norm, "limit": event.limit},
                fix="norm = clip_grad_norm_(...); optimizer.step() only if torch.isfinite(norm)",
            )
            return


def _wrong(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
