"""Histories: what keeps the graphs of earlier micro-batches alive."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import Event, Finding, GraphsKept


class LossHistoryKeepsGraph(BaseCheck):
    """Graphs of updates long past still live, more of them each time one looks."""

    rules = ("loss-history-keeps-graph",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, GraphsKept):
            kept = f"{event.tensors} tensors that carry their graph" if event.tensors else "graphs"
            if event.graphs:
                kept = f"the graphs of {event.graphs} earlier updates"
            holder = f" by {event.holder}" if event.holder else ""
            yield Finding(
                rule="loss-history-keeps-graph",
                severity="warning",
                at=event.at,
                update=event.asked,
                message=f"{kept} are kept alive{holder} after {event.asked} updates, and their number grows",
                evidence={
                    "updates_kept": event.graphs,
                    "tensors": event.tensors,
                    "grew_by": event.growth,
                    "holder": event.holder,
                },
                fix="keep numbers, not graphs: history.append(loss.item()), or total += loss.detach()",
            )
