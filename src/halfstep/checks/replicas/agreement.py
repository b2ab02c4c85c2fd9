"""What replicas must agree on: the loss scale, whether an update is applied, and the parameters themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from halfstep.checks.replicas.ranks import CrossCheck, Totals, Turn
from halfstep.checks.story import Story
from halfstep.events import Finding, ParametersMarked, Place

_APART = 1e-5  # of the parameters' norm: more than another device rounds


class ScalesAndSkipsDiffer(CrossCheck):
    """The first of the two to happen is the cause of the other."""

    rules = ("loss-scales-differ-across-ranks", "skip-differs-across-ranks")

    def __init__(self) -> None:
        self._rule: str | None = None
        self._first: Finding | None = None
        self._count = 0
        self._attempts: dict[int, list[tuple[int, Place | None, int]]] = {}  # rank -> (micro-batches, line, optimizer)
        self._parted: tuple[int, Mapping[int, Turn]] | None = None

    def updated(self, turns: Mapping[int, Turn]) -> Iterable[Finding]:
        for finding in (self._scales(turns), self._skips(turns)):
            if finding is not None and self._rule in (None, finding.rule):
                self._rule, self._first = finding.rule, self._first or finding
                self._count += 1
        if self._parted is None and len({t.update.attempt.micro for t in turns.values()}) > 1:
            self._parted = next(iter(turns.values())).number, turns
        return ()

    def end(self, totals: Mapping[int, Totals]) -> Iterable[Finding]:
        if self._first is not None:
            values = {name: getattr(self._first, name) for name in self._first.__slots__}
            yield Finding(**{**values, "count": self._count})
        elif self._parted is not None:
            yield from self._skipped_by_hand(totals)
        else:
            yield from self._never(totals)

    def _scales(self, turns: Mapping[int, Turn]) -> Finding | None:
        scales = {r: t.update.live[-1].scale for r, t in turns.items() if t.update.live}
        known = {r: s for r, s in scales.items() if s is not None}
        if len(known) < 2 or len(set(known.values())) == 1:
            return None
        usual = Counter(known.values()).most_common(1)[0][0]
        odd = next(r for r, s in known.items() if s != usual)
        other = next(r for r, s in known.items() if s == usual)
        return Finding(
            rule="loss-scales-differ-across-ranks",
            severity="error",
            at=_where_scales_parted(turns, odd),
            update=turns[odd].update.number,
            message=(
                f"rank {odd} multiplies its loss by {known[odd]:g} and rank {other} by {known[other]:g}: their "
                "gradients are combined at different scales, and each rank divides by its own"
            ),
            evidence={"scales": {str(r): s for r, s in known.items()}},
            fix=(
                "give every rank the same scaler: load its state on all ranks, and let all of them see the same "
                "non-finite values (check after the gradients were reduced)"
            ),
            rank=odd,
        )

    def _skips(self, turns: Mapping[int, Turn]) -> Finding | None:
        outcomes = {r: t.update.attempt.outcome for r, t in turns.items()}
        if len(set(outcomes.values())) == 1:
            return None
        skipped = next(r for r, o in outcomes.items() if o != "applied")
        applied = next((r for r, o in outcomes.items() if o == "applied"), skipped)
        attempt = turns[skipped].update.attempt
        return _skip_finding(attempt.at, turns[skipped].update.number, skipped, applied, by_hand=False)

    def _skipped_by_hand(self, totals: Mapping[int, Totals]) -> Iterable[Finding]:
        """As many contributions on every rank, but not as many attempts: some rank left one out."""
        assert self._parted is not None
        number, turns = self._parted
        ends = {r: totals[r] for r in turns}
        if len({t.contributions for t in ends.values()}) > 1:
            return
        optimizer = next(iter(turns.values())).update.optimizer
        attempts = {r: t.attempts[optimizer] for r, t in ends.items()}
        if len(set(attempts.values())) == 1:
            return
        micros = {r: t.update.attempt.micro for r, t in turns.items()}
        applied, skipped = min(micros, key=micros.__getitem__), max(micros, key=micros.__getitem__)
        if attempts[applied] > attempts[skipped]:
            yield _skip_finding(turns[applied].update.attempt.at, number, skipped, applied, by_hand=True)

    def _never(self, totals: Mapping[int, Totals]) -> Iterable[Finding]:
        """A rank with as many contributions that attempts no update at all, and is sent no parameters either."""
        for applied, ends in totals.items():
            for first in ends.firsts.values():
                for skipped in sorted(ends.fellows & totals.keys()):
                    other = totals[skipped]
                    if other.contributions == ends.contributions and not (other.firsts or other.sent or ends.sent):
                        yield _skip_finding(first.attempt.at, first.number, skipped, applied, by_hand=True)
                        return


def _skip_finding(at: Place | None, update: int, skipped: int, applied: int, *, by_hand: bool) -> Finding:
    how = "left out" if by_hand else "skipped"
    return Finding(
        rule="skip-differs-across-ranks",
        severity="error",
        at=at,
        update=update,
        message=(
            f"rank {skipped} {how} this update and rank {applied} applied it: from here on their parameters, optimizer "
            "states and counters differ"
        ),
        evidence={"skipped": [skipped], "applied": [applied], "by_hand": by_hand},
        fix=(
            "decide together: skip = torch.tensor(float(bad)); dist.all_reduce(skip, op=dist.ReduceOp.MAX), or check "
            "the gradients after they were reduced"
        ),
        rank=skipped,
    )


def _where_scales_parted(turns: Mapping[int, Turn], odd: int) -> Place | None:
    """Where the odd rank's scaler was made or loaded, if it differed from the beginning; else where it was updated."""
    turn = turns[odd]
    scaler = turn.story.scalers.get(turn.update.live[-1].scaler or 0)
    others = [t.story.scalers.get(t.update.live[-1].scaler or 0) for r, t in turns.items() if r != odd]
    if scaler is None or scaler.made is None:
        return turn.update.live[-1].at
    if any(o is not None and o.loaded != scaler.loaded for o in others):
        return scaler.made.at
    if any(o is not None and o.made is not None and o.made.scale != scaler.made.scale for o in others):
        return scaler.made.at
    return turn.update.live[-1].at


class ParametersDiffer(CrossCheck):
    rules = ("parameters-differ-across-ranks",)

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], dict[int, ParametersMarked]] = {}  # (optimizer, update) -> rank -> mark
        self._made: dict[tuple[int, int], Place | None] = {}  # (rank, optimizer) -> where it was made
        self._fellows: set[int] = set()
        self._averaged = False
        self._unreduced: tuple[int, Turn] | None = None

    def marked(self, rank: int, mark: ParametersMarked, story: Story) -> Iterable[Finding]:
        self._marks.setdefault((mark.optimizer, mark.update), {})[rank] = mark
        made = story.optimizer(mark.optimizer).made
        self._made[rank, mark.optimizer] = made.at if made is not None else None
        return ()

    def updated(self, turns: Mapping[int, Turn]) -> Iterable[Finding]:
        for rank, turn in turns.items():
            self._fellows.update(turn.fellows)
            if turn.number > 1 and any(e.what == "parameters" for e in turn.exchanged):
                self._averaged = True  # replicas that run apart for a while, on purpose
            hook = [m.hook for m in turn.made.values() if m.hook and "localSGD" in m.hook]
            self._averaged |= bool(hook)
            mine = [b for b in turn.backwards if turn.update.optimizer in b.optimizers]
            if self._unreduced is None and mine and not any(b.reduced for b in mine):
                self._unreduced = rank, turn
        return ()

    def end(self, totals: Mapping[int, Totals]) -> Iterable[Finding]:
        if self._averaged:
            return
        for (optimizer, update), marks in sorted(self._marks.items(), key=lambda item: item[0][1]):
            known = {r: m for r, m in marks.items() if r in self._fellows and m.mark is not None and m.norm}
            if len(known) < 2:
                continue
            low, high = (pick(known.values(), key=lambda m: m.mark or 0.0) for pick in (min, max))
            apart = abs((high.mark or 0.0) - (low.mark or 0.0)) / max(low.norm or 0.0, high.norm or 0.0)
            if apart > _APART:
                yield self._finding(optimizer, update, known, apart)
                return

    def _finding(self, optimizer: int, update: int, marks: Mapping[int, ParametersMarked], apart: float) -> Finding:
        rank, mark = max(marks.items())
        at, why, fix = mark.at, "", "keep every parameter that is trained inside the wrapper, and update it alike"
        if update == 0:
            at = self._made.get((rank, optimizer)) or at
            why = "they began with different values"
            fix = "for p in model.parameters(): dist.broadcast(p.data, 0)  # or wrap the model in DDP, which does it"
        elif self._unreduced is not None:
            turn = self._unreduced[1]
            last = turn.backwards[-1]
            at, why = last.forward_at or at, "no contribution of an update was reduced: all its forwards ran in no_sync"
            fix = "run the forward of a group's last micro-batch outside no_sync"
        ranks = ", ".join(map(str, sorted(marks)))
        return Finding(
            rule="parameters-differ-across-ranks",
            severity="error",
            at=at,
            update=update or None,
            message=(
                f"the parameters of ranks {ranks} differ by {apart:.2g} of their norm "
                + ("before the first update" if update == 0 else f"after update {update}")
                + (f": {why}" if why else ", although their gradients are combined")
            ),
            evidence={"marks": {str(r): m.mark for r, m in marks.items()}, "apart": apart},
            fix=fix,
        )
