"""Orders: whether a second pass through the data comes in another order than the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import Contribution, Event, Finding, ModuleCalled, OrderPassed

_INDICES = 8
_BY_HAND = frozenset({"randperm", "shuffle", "permutation"})  # orders that the script drew itself
_BATCHES = 4  # of a pass that was broken off


@dataclass(slots=True)
class _Source:
    passes: int = 0
    same: int = 1  # passes in one and the same order, up to now
    optimizers: frozenset[int] = frozenset()


class EpochOrderRepeats(BaseCheck):
    """A sampler that means to shuffle gives the same optimizer the same order again."""

    rules = ("epoch-order-repeats",)

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        self._last: frozenset[int] = frozenset()  # optimizers of the last contribution
        self._drawn: tuple[OrderPassed, _Source] | None = None

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, Contribution):
            if event.optimizers:
                self._last = frozenset(event.optimizers)
        elif isinstance(event, ModuleCalled) and self._drawn is not None:
            drawn, source = self._drawn
            self._drawn = None
            if event.grad_enabled:  # drawn for training, not for an evaluation on always the same part
                yield self._finding(drawn, source)
        elif isinstance(event, OrderPassed):
            yield from self._passed(event)

    def _passed(self, event: OrderPassed) -> Iterable[Finding]:
        source = self._sources.setdefault(event.source, _Source())
        by_hand = event.sampler in _BY_HAND
        source.passes += 2 if by_hand and not source.passes else 1  # the first draw has none to be compared with
        same_run = not source.optimizers or bool(source.optimizers & self._last)
        source.optimizers = self._last
        enough = event.micro - event.began >= 2 if by_hand else event.batches >= (2 if event.whole else _BATCHES)
        if not (same_run and enough and event.shuffles and event.indices >= _INDICES and self._last):
            source.same = 1
            return
        if event.repeats != event.batches:
            source.same = 1
            self._drawn = None  # several orders were drawn: the one that repeats may be for an evaluation
            return
        source.same += 1
        if by_hand:
            self._drawn = (event, source)
        else:
            yield self._finding(event, source)

    def _finding(self, event: OrderPassed, source: _Source) -> Finding:
        if event.sampler_epoch:
            fix = "sampler.set_epoch(epoch) at the start of each epoch"
        elif event.sampler in _BY_HAND:
            fix = "seed the generator once, before the first epoch (or with seed + epoch)"
        else:
            fix = "seed the sampler's generator once, before the first epoch (or with seed + epoch)"
        return Finding(
            rule="epoch-order-repeats",
            severity="error",
            at=event.at,
            message=(
                f"pass {source.passes} visited its {event.indices} indices in the very order of the pass before "
                f"({event.sampler} shuffles with the same seed each time)"
            ),
            evidence={"sampler": event.sampler, "indices": event.indices, "passes": source.passes},
            fix=fix,
        )
