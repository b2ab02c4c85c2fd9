"""Ranks side by side: the updates of several processes that train one model, aligned by their number, and compared.

Each rank's events are folded into its own story; the i-th attempts of all of them are one turn. A rank that ended
earlier is left out of the later turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from halfstep.checks.story import Story, Update
from halfstep.events import (
    Contribution,
    Event,
    ExamplesSeen,
    Exchanged,
    Finding,
    OrderPassed,
    ParametersMarked,
    ReplicaBackward,
    ReplicasMade,
)

# The events that a comparison rests on; a reader may pass over all others.
NEEDED = frozenset(
    (
        *("Contribution", "GradientsCleared", "GradientsEdited", "Clipped", "ParametersChanged", "Unscaled"),
        *("ScaleUpdated", "ScalerMade", "OptimizerMade", "StateLoaded", "Attempt", "HalfUpdate"),
        *("ReplicasMade", "ReplicaBackward", "Exchanged", "ExamplesSeen", "ParametersMarked", "OrderPassed"),
    )
)
_FACTS = 4096  # between two attempts


@dataclass(slots=True)
class Turn:
    """One attempt of one rank: the update, and what was seen of replicas since the attempt before."""

    rank: int
    number: int
    update: Update
    story: Story
    backwards: list[ReplicaBackward] = field(default_factory=list)
    exchanged: list[Exchanged] = field(default_factory=list)
    examples: list[ExamplesSeen] = field(default_factory=list)
    made: Mapping[int, ReplicasMade] = field(default_factory=dict)

    @property
    def fellows(self) -> tuple[int, ...]:
        """The ranks whose gradients this update's are combined with; empty where it is alone or it cannot be told."""
        optimizer = self.update.optimizer
        for backward in self.backwards:
            if optimizer in backward.optimizers:
                return backward.ranks
        for exchanged in self.exchanged:
            if exchanged.what == "gradients" and optimizer in exchanged.optimizers:
                return exchanged.ranks
        sharded = [m.ranks for m in self.made.values() if m.how != "ddp"]
        if sharded:
            return sharded[0] if len(set(sharded)) == 1 else ()
        last = max((c.seq for c in self.update.live), default=0)
        for exchanged in self.exchanged:  # gradients copied into one buffer; before the end of backward: activations
            if exchanged.what == "buffer" and exchanged.operator == "all_reduce" and exchanged.seq > last:
                return exchanged.ranks
        return ()

    @property
    def averaged(self) -> bool | None:
        """Whether the gradients of its fellows are averaged; False: added up; None: it cannot be told."""
        optimizer = self.update.optimizer
        mine = [b for b in self.backwards if optimizer in b.optimizers]
        by_hand = [e for e in self.exchanged if e.what == "gradients" and optimizer in e.optimizers]
        if mine:
            if by_hand or not any(b.reduced for b in mine):
                return None
            made = self.made.get(mine[0].module)
            return True if made is None or made.averages else None
        if by_hand:
            ops = {(e.operator.removesuffix("_coalesced"), e.op) for e in by_hand}
            return {("all_reduce", "avg"): True, ("all_reduce", "sum"): False}.get(ops.pop()) if len(ops) == 1 else None
        return True if any(m.how != "ddp" for m in self.made.values()) else None


class CrossCheck:
    """Judges what only several ranks together show. Families override what they need."""

    rules: ClassVar[tuple[str, ...]] = ()

    def marked(self, rank: int, mark: ParametersMarked, story: Story) -> Iterable[Finding]:
        return ()

    def updated(self, turns: Mapping[int, Turn]) -> Iterable[Finding]:
        """``turns``: of ranks whose gradients are combined, two or more, all at the same number."""
        return ()

    def end(self, totals: Mapping[int, Totals]) -> Iterable[Finding]:
        return ()


@dataclass(slots=True)
class Totals:
    """A rank at its end: contributions begun, attempts by optimizer, and the first of each.

    ``fellows``: ranks its gradients met; ``sent``: it exchanged parameters after its first update; ``passes``: the last
    contribution of each pass through its data.
    """

    contributions: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    firsts: dict[int, Update] = field(default_factory=dict)
    fellows: set[int] = field(default_factory=set)
    sent: bool = False
    passes: set[int] = field(default_factory=set)


class _Rank:
    """The turns of one rank, one after the other."""

    def __init__(self, number: int, events: Iterable[Event], checks: list[CrossCheck]) -> None:
        self.number = number
        self.totals = Totals()
        self.found: list[Finding] = []
        self._events = iter(events)
        self._checks = checks
        self._story = Story()
        self._made: dict[int, ReplicasMade] = {}
        self._turns = 0

    def turns(self) -> Iterator[Turn]:
        backwards: list[ReplicaBackward] = []
        exchanged: list[Exchanged] = []
        examples: list[ExamplesSeen] = []
        known: dict[int, ReplicaBackward] = {}  # the last ordinary one of each module: later ones are not told
        for event in self._events:
            match event:
                case ReplicasMade():
                    self._made[event.module] = event
                case ReplicaBackward():
                    backwards.append(event)
                    known[event.module] = event
                case Exchanged() if len(exchanged) < _FACTS:
                    exchanged.append(event)
                    self.totals.sent |= event.what == "parameters" and self._turns > 0
                case ExamplesSeen() if len(examples) < _FACTS:
                    examples.append(event)
                case ParametersMarked():
                    for check in self._checks:
                        self.found.extend(check.marked(self.number, event, self._story))
                case OrderPassed() if len(self.totals.passes) < _FACTS:
                    self.totals.passes.add(event.micro)
                case Contribution():
                    self.totals.contributions = max(self.totals.contributions, event.number)
                case _:
                    pass
            update = self._story.tell(event)
            if update is None:
                continue
            self._turns += 1
            self.totals.attempts[update.optimizer] += 1
            self.totals.firsts.setdefault(update.optimizer, update)
            if not backwards and update.live:  # told no more: as before
                backwards = [b for b in known.values() if update.optimizer in b.optimizers]
            turn = Turn(self.number, self._turns, update, self._story, backwards, exchanged, examples, dict(self._made))
            self.totals.fellows.update(turn.fellows)
            yield turn
            backwards, exchanged, examples = [], [], []


def compare(streams: Mapping[int, Iterable[Event]], checks: list[CrossCheck]) -> list[Finding]:
    """Judge the events of several ranks of one group together."""
    ranks = [_Rank(rank, events, checks) for rank, events in sorted(streams.items())]
    running = {rank.number: rank.turns() for rank in ranks}
    found: list[Finding] = []
    while running:
        turns: dict[int, Turn] = {}
        for number, stream in list(running.items()):
            turn = next(stream, None)
            if turn is None:
                del running[number]
            else:
                turns[number] = turn
        for together in _together(turns):
            for check in checks:
                found.extend(check.updated(together))
    for rank in ranks:
        found.extend(rank.found)
    for check in checks:
        found.extend(check.end({rank.number: rank.totals for rank in ranks}))
    return found


def _together(turns: Mapping[int, Turn]) -> Iterator[dict[int, Turn]]:
    """The ranks whose gradients met, and whose attempt is of the same optimizer."""
    groups: dict[tuple[tuple[int, ...], int], dict[int, Turn]] = {}
    for rank, turn in turns.items():
        if turn.fellows:
            groups.setdefault((turn.fellows, turn.update.optimizer), {})[rank] = turn
    for group in groups.values():
        if len(group) > 1:
            yield group
