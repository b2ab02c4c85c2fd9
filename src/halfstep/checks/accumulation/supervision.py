"""What is supervised: positions that should not count, micro-batches in which nothing counts, and the loss people read.

The value of a loss goes to a log or a running average; which factors it carries there is told by where it was read.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from halfstep.checks.accumulation.evidence import Evidence
from halfstep.checks.accumulation.weights import near
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import Contribution, Event, Finding, LossRead, ModuleCalled, Place, Share

_KEPT = 256
_FEW = 0.98  # fewer supervised than this share of the positions: some are ignored


class Supervision(BaseCheck):
    rules = ("ignored-positions-counted", "no-supervised-elements", "logged-loss-misleading")

    def __init__(self) -> None:
        self._examples: int | None = None  # of the last forward
        self._recent: OrderedDict[int, Contribution] = OrderedDict()
        self._reads: OrderedDict[int, list[LossRead]] = OrderedDict()
        self._empty: dict[int, Contribution] = {}  # contributions of this group that supervise nothing and are NaN
        self._told: set[int] = set()
        self._silent: dict[int, Contribution] = {}  # contributions that supervise nothing and harm nothing
        self._silences = 0
        self._counted: dict[tuple[int, str, int], Evidence] = {}
        self._policies: set[int] = set()  # routes
        self._parts: dict[tuple[int, str, int], tuple[float, float]] = {}  # smallest and largest part left by a mask
        self._logs: dict[tuple[str, int], _Log] = {}
        self._before: tuple[Contribution, ...] = ()

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case ModuleCalled(examples=int(examples), grad_enabled=True) if not event.type.endswith("Loss"):
                self._examples = examples
            case Contribution():
                yield from self._contributed(event)
            case LossRead():
                yield from self._read(event)
            case _:
                pass

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        live = update.live
        for contribution in live:
            spoiled = update.attempt.nonfinite or update.attempt.outcome == "skipped"
            if spoiled and contribution.number in self._empty and contribution.number not in self._told:
                yield from self._spoiled(contribution, update, len(live))
        for log in self._logs.values():
            log.updated(self._before)  # one update late: the loss is often read after its update
        self._before = live
        for key, evidence in self._counted.items():
            if key[0] not in self._policies:
                yield from evidence.firm()

    def end(self, story: Story) -> Iterable[Finding]:
        for key, evidence in self._counted.items():
            if key[0] not in self._policies:
                yield from evidence.rest()
        for log in self._logs.values():
            log.updated(self._before)
            yield from log.finding()
        yield from self._harmless()

    # -- contributions -------------------------------------------------------------------------------------------

    def _contributed(self, event: Contribution) -> Iterator[Finding]:
        _keep(self._recent, event.number, event)
        data = [s for s in event.shares if s.loss != "penalty"]
        seen: dict[str, int] = {}
        for share in data:
            ordinal = seen[share.loss] = seen.get(share.loss, -1) + 1
            self._positions(event, share, ordinal, alone=len(data) == 1)
        if event.loss is not None and math.isnan(event.loss) and any(_nothing(s) for s in data):
            self._empty[event.number] = event
            if len(self._empty) > _KEPT:
                self._empty.pop(next(iter(self._empty)))
            for read in self._reads.pop(event.number, []):
                yield from self._nan_read(event, read)

        elif data and all(share.supervised == 0 for share in data):
            self._silences += 1
            if len(self._silent) < _KEPT:
                self._silent[event.number] = event

    def _positions(self, event: Contribution, share: Share, ordinal: int, alone: bool) -> None:
        """Divided by all positions, ignored ones included: coefficient times positions is one, not times supervised."""
        if share.loss == "policy_gradient":
            self._policies.add(event.route)  # what a policy's gradient is divided by is a choice
        if not share.supervised or not math.isfinite(share.total) or event.route in self._policies:
            return
        key = (event.route, share.loss, ordinal)
        evidence = self._counted.setdefault(key, Evidence(least=4, share=0.8, weight="ignored"))
        own_mean = share.reduction == "mean" and share.loss in ("cross_entropy", "nll")  # torch counts targets itself
        live = self._unmasked(key, share)
        counted = share.supervised if live is None else live
        if own_mean or counted >= _FEW * share.positions or share.spread > 0.02:
            return
        evidence.chance()
        over_all = share.coefficient * share.positions / (event.scale or 1.0) / max(share.parts, 1)
        numbers = [d.by for d in event.divisions if d.by >= 1]
        factors = [1.0, math.prod(numbers), *numbers]
        if not any(near(over_all * factor, 1.0, 0.02 if event.dtype != "float32" else 0.004) for factor in factors):
            return
        explicit = share.ignored_share > 0.01
        if not explicit and (not alone or self._examples is None or share.positions <= self._examples):
            return  # a mask over whole examples may choose them on purpose (pseudo-labels above a threshold)
        ignored = 1 - counted / share.positions
        evidence.add(
            Finding(
                rule="ignored-positions-counted",
                severity="error" if explicit else "warning",
                at=_divided_at(event, share.positions) or event.at,
                message=(
                    f"the loss is divided by {share.positions} positions of which {counted} are supervised: "
                    f"{ignored:.0%} of its weight sits on ignored positions, gradients are "
                    f"{share.positions / counted:.3g} times too small"
                ),
                evidence={"positions": share.positions, "supervised": counted, "ignored": ignored},
                fix="divide the sum by the number of supervised positions, not by all of them",
            )
        )

    def _unmasked(self, key: tuple[int, str, int], share: Share) -> int | None:
        """How many positions a mask on the loss's inputs leaves, where it is not the same share of them every time.

        A mask that always leaves one of so many (the action taken) changes the learning rate and nothing else.
        """
        if not share.live:
            return None
        part = share.live / share.positions
        low, high = self._parts.get(key, (part, part))
        self._parts[key] = low, high = min(low, part), max(high, part)
        return share.live if high - low > 0.01 else None

    # -- nothing supervised --------------------------------------------------------------------------------------

    def _spoiled(self, event: Contribution, update: Update, size: int) -> Iterator[Finding]:
        self._told.add(event.number)
        share = next(s for s in event.shares if _nothing(s))
        fate = "the update was skipped" if update.attempt.outcome == "skipped" else "they were applied"
        yield Finding(
            rule="no-supervised-elements",
            severity="error",
            at=_divided_at(event, 0.0) or event.at,
            update=update.number,
            message=(
                f"micro-batch {event.number} has no supervised element among {share.positions}: its {share.loss} loss "
                f"was divided by 0 and its gradients are NaN; {fate}"
                + (f" ({size} micro-batches lost)" if size > 1 else "")
            ),
            evidence={"positions": share.positions, "supervised": 0, "micro_batch": event.number, "gradient": "nan"},
            fix="skip such micro-batches, or divide by count.clamp(min=1)",
        )

    def _nan_read(self, event: Contribution, read: LossRead) -> Iterator[Finding]:
        if event.number in self._told:
            return
        self._told.add(event.number)
        share = next(s for s in event.shares if _nothing(s))
        yield Finding(
            rule="no-supervised-elements",
            severity="warning",
            at=read.at or event.at,
            message=(
                f"micro-batch {event.number} has no supervised element among {share.positions}: its loss is NaN and "
                "was taken into the script's numbers here, while its gradients are exactly zero and harm nothing"
            ),
            evidence={"positions": share.positions, "supervised": 0, "micro_batch": event.number, "gradient": "zero"},
            fix="leave micro-batches without targets out of the average, or skip them",
        )

    def _harmless(self) -> Iterator[Finding]:
        """Micro-batches without targets that spoilt nothing: their share of the update is missing all the same."""
        known = {**self._silent, **{n: c for n, c in self._empty.items() if n not in self._told}}
        if not known:
            return
        number, first = min(known.items())
        count = max(self._silences, len(self._silent)) + len(known) - len(self._silent)
        more = f" (and {count - 1} more)" if count > 1 else ""
        positions = max(s.positions for s in first.shares if s.supervised == 0)
        yield Finding(
            rule="no-supervised-elements",
            severity="info",
            at=first.loss_at or first.at,
            message=(
                f"micro-batch {number}{more} has no supervised element among {positions}: it added exactly zero to "
                "the gradients; an update of such micro-batches alone moves parameters by momentum and decay only"
            ),
            count=count,
            evidence={"positions": positions, "supervised": 0, "micro_batch": number, "gradient": "zero"},
            fix="skip such micro-batches, and the update where the whole group has none",
        )

    # -- reads ---------------------------------------------------------------------------------------------------

    def _read(self, event: LossRead) -> Iterator[Finding]:
        contribution = self._recent.get(event.contribution)
        if contribution is None:
            _keep(self._reads, event.contribution, [*self._reads.get(event.contribution, []), event])
        elif contribution.number in self._empty:
            yield from self._nan_read(contribution, event)
        if event.at is not None and len(self._logs) < _KEPT:
            self._logs.setdefault((event.at.file, event.at.line), _Log()).read(event)


@dataclass(slots=True)
class _Log:
    """One line that reads losses: which factors its values carry, and how many of a group's micro-batches it reads."""

    first: LossRead | None = None
    pending: dict[int, LossRead] = field(default_factory=dict)
    groups: int = 0
    scaled: int = 0  # groups whose value carried the loss scale
    divided: int = 0  # groups of which one value was read, divided for the group
    alone: int = 0  # groups of which one whole value was read
    scale: float = 1.0
    size: int = 1

    def read(self, event: LossRead) -> None:
        self.first = self.first or event
        self.pending[event.contribution] = event
        if len(self.pending) > _KEPT:
            self.pending.pop(next(iter(self.pending)))

    def updated(self, live: tuple[Contribution, ...]) -> None:
        reads = [(c, self.pending.pop(c.number)) for c in live if c.number in self.pending]
        if not reads:
            return
        self.groups += 1
        contribution, read = reads[0]
        total = max((s.total for s in contribution.shares if math.isfinite(s.total)), default=math.nan) / read.factor
        scale = contribution.scale or 1.0
        if contribution.seeded:
            total, scale = total / scale, 1.0
        if scale >= 64 and math.isfinite(total) and total > scale**0.5:
            self.scaled += 1
            self.scale = scale
        elif len(reads) == 1 and len(live) > 1:
            self.size = len(live)
            divided = near(total * len(live), 1.0, 0.02)
            self.divided += divided and not read.multiplied
            self.alone += near(total, 1.0, 0.02) or (divided and read.multiplied)

    def finding(self) -> Iterator[Finding]:
        size, said = self.size, "the value read here "
        texts = (
            (self.scaled, f"carries the loss scale {self.scale:g}"),
            (self.divided, f"is one micro-batch's loss divided by {size}: 1/{size} of a loss"),
            (self.alone, f"is one micro-batch's loss, the other {size - 1} of its group are left out"),
        )
        count, text = max(texts)
        if self.first is None or not count or count < self.groups / 2:
            return
        yield Finding(
            rule="logged-loss-misleading",
            severity="info",
            at=self.first.at,
            message=said + text,
            count=count,
            evidence={"scale": self.scale if self.scaled else None, "micro_batches": self.size},
            fix="log the mean over the group: add loss.detach() of every micro-batch, undivided and unscaled",
        )


def _divided_at(event: Contribution, by: float) -> Place | None:
    """Where the whole loss was divided by this number, else where it was reduced."""
    return next((d.at for d in event.divisions if d.by == by and d.at is not None), event.loss_at)


def _nothing(share: Share) -> bool:
    """No element of the term counts, and that made it 0 / 0."""
    return share.supervised == 0 and not math.isfinite(share.total)


def _keep(memory: OrderedDict[int, Any], key: int, value: Any) -> None:
    memory[key] = value
    if len(memory) > _KEPT:
        memory.popitem(last=False)
