"""Batch normalisation under accumulation: each micro-batch is normalised by itself, whatever the loop does right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from halfstep.checks.accumulation.weights import strands
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import BatchStatistics, Event, Finding

_LAW = 1e-5  # split invariance in FP32, relative


class BatchNormUnderAccumulation(BaseCheck):
    rules = ("batchnorm-under-accumulation",)

    def __init__(self) -> None:
        self._waiting: list[BatchStatistics] = []

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, BatchStatistics):
            last = story.optimizer(event.optimizer).updates
            if last and last[-1].contributions and last[-1].contributions[-1].number in event.contributions:
                yield from self._judge(event, last[-1])
            else:
                self._waiting = [*self._waiting[-7:], event]

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        if not self._waiting:
            return
        mine = [e for e in self._waiting if e.optimizer == update.optimizer]
        self._waiting = [e for e in self._waiting if e.optimizer != update.optimizer]
        for event in mine:
            yield from self._judge(event, update)

    def _judge(self, event: BatchStatistics, update: Update) -> Iterator[Finding]:
        numbers = set(event.contributions)
        strand = next((s for s in strands(update) if {c.number for c in s.contributions} == numbers), None)
        if strand is None or strand.size < 2:
            return  # real and fake, or two views: batches of their own by design
        size, samples, difference = strand.size, event.samples, event.difference
        beyond = difference is not None and difference > _LAW
        text = "" if difference is None else f": as one batch its gradient would differ by {difference:.1%}"
        layers = "1 batch normalisation layer" if event.layers == 1 else f"{event.layers} batch normalisation layers"
        yield Finding(
            rule="batchnorm-under-accumulation",
            severity="warning" if beyond else "info",
            at=event.at or strand.last.at,
            update=update.number,
            message=(
                f"{layers} took statistics over {samples} examples, {size} times a group, instead of once over its "
                f"{size * samples}{text}"
            ),
            evidence={
                "micro_batches": size,
                "examples": samples,
                "layers": event.layers,
                "difference": difference,
            },
            fix="use GroupNorm or LayerNorm, freeze the statistics with .eval(), or take larger micro-batches",
        )
