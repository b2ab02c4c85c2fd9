"""Loss scaling: what is done to gradients while they carry the loss scale."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import Clipped, Event, Finding


class ClipScaledGradients(BaseCheck):
    """Clipped by norm or value while multiplied by the loss scale; a threshold that is itself scaled is right."""

    rules = ("clip-scaled-gradients",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if not isinstance(event, Clipped):
            return
        for ident in event.optimizers:
            live = story.optimizer(ident).live
            scaled = [c for c in live if c.scale is not None and c.scaler is not None]
            if not scaled or ident in story.scaler(scaled[-1].scaler or 0).unscaled:
                continue
            scale = scaled[-1].scale or 1.0
            if scale == 1.0 or event.limit >= scale * 1e-3:
                continue  # the limit carries the scale too
            arrived = min(event.limit, event.norm or event.limit) / scale
            yield Finding(
                rule="clip-scaled-gradients",
                severity="error",
                at=event.at,
                message=(
                    f"clipped to {event.limit:g} while multiplied by the loss scale {scale:g}: "
                    f"the optimizer received a norm of at most {arrived:.2g}"
                ),
                evidence={"limit": event.limit, "scale": scale, "norm": event.norm, "received": arrived},
                fix="call scaler.unscale_(optimizer) once, after the last backward of the group and before clipping",
            )
            return
