"""Is precision to blame? The criterion, fixed before anything runs, and what the two runs say to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from halfstep.probe.pair import Account
from halfstep.probe.parting import TOLERANCES, Pair, Parting, Sameness, pairs, parting, precision, sameness

Blame = Literal["precision", "not precision", "unknown"]
_SHARE = 0.05  # of FP32's value
_GAIN = 0.02  # of what FP32 gained since its first updates
_NOISE = 2.0  # standard errors of the difference, from batch to batch
_WORSE = 1.05  # times its first loss: a run that ends there has failed


@dataclass(frozen=True, slots=True)
class Criterion:
    """What is judged, how far apart the two may be (None: the default); ``share``: as a share of FP32's value."""

    metric: str = "loss"
    tolerance: float | None = None
    share: bool = False

    @property
    def of_updates(self) -> bool:
        return self.metric in ("loss", "grad_norm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The criterion at the end of the updates both came to: means over the last ``window`` of them, for a logged number
    its last value. ``first``: FP32's first; ``allowed``: the tolerance in force, ``how`` it came; ``spread``: FP32's
    standard deviation from batch to batch."""

    own: float
    fp32: float
    first: float
    allowed: float
    how: str
    window: int
    spread: float = 0.0

    @property
    def apart(self) -> bool:
        if math.isfinite(self.own) and math.isfinite(self.fp32):
            return abs(self.own - self.fp32) > self.allowed
        return math.isfinite(self.own) != math.isfinite(self.fp32)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs, what they share, where they part, and the verdict in words."""

    criterion: Criterion
    own: Account
    fp32: Account
    matched: Sequence[Pair]
    dtype: str
    same: Sameness
    parted: Parting | None
    outcome: Outcome | None
    blame: Blame
    words: str
    notes: tuple[str, ...] = ()


def judge(criterion: Criterion, own: Account, fp32: Account) -> Comparison:
    """Set two runs side by side and say whether precision is to blame."""
    matched, dtype = pairs(own, fp32), precision(own)
    same = sameness(matched, own.half_parameters > 0)
    parted = parting(matched, dtype)
    outcome = _outcome(criterion, own, fp32, matched)
    blame, words = _verdict(criterion, own, fp32, matched, dtype, same, parted, outcome)
    notes = tuple(_notes(own, fp32, matched, same, parted))
    return Comparison(criterion, own, fp32, matched, dtype, same, parted, outcome, blame, words, notes)


# -- the criterion -------------------------------------------------------------------------------------------------


def _outcome(criterion: Criterion, own: Account, fp32: Account, matched: Sequence[Pair]) -> Outcome | None:
    if not criterion.of_updates:
        ours, theirs = own.metrics.get(criterion.metric), fp32.metrics.get(criterion.metric)
        if not ours or not theirs:
            return None
        count = min(len(ours), len(theirs))
        a, b = ours[count - 1], theirs[count - 1]
        allowed, how = _given(criterion, b) or (_SHARE * abs(b), "5 % of FP32's value")
        return Outcome(a, b, theirs[0], allowed, how, 1)
    # An optimizer's own curve: of a script with several, the one that makes most updates.
    counts: dict[int, int] = {}
    for point, _ in matched:
        counts[point.optimizer] = counts.get(point.optimizer, 0) + 1
    main = max(counts, key=lambda ident: counts[ident], default=None)
    field = "loss" if criterion.metric == "loss" else "norm"
    both = [(getattr(a, field), getattr(b, field)) for a, b in matched if a.optimizer == main]
    both = [(a, b) for a, b in both if a is not None and b is not None]
    if not both:
        return None
    window = max(1, min(len(both) // 5, 50))
    last, start = both[-window:], both[0][1]
    a, b = fmean(x for x, _ in last), fmean(x for _, x in last)
    finite = window > 1 and all(math.isfinite(x) for pair in last for x in pair)
    own_spread = stdev(x for _, x in last) if finite else 0.0
    given = _given(criterion, b)
    if given is not None:
        return Outcome(a, b, start, *given, window, own_spread)
    gained = abs(start - b) if criterion.metric == "loss" and math.isfinite(start) else 0.0
    noise = _NOISE * stdev(x - y for x, y in last) / math.sqrt(window) if finite else 0.0
    options = [
        (_SHARE * abs(b), "5 % of FP32's value"),
        (_GAIN * gained, "2 % of what FP32 gained"),
        (noise, f"twice the standard error of the last {window} differences"),
    ]
    allowed, how = max((o for o in options if math.isfinite(o[0])), default=(0.0, "none"), key=lambda o: o[0])
    return Outcome(a, b, start, allowed, how, window, own_spread)


def _given(criterion: Criterion, fp32: float) -> tuple[float, str] | None:
    if criterion.tolerance is None:
        return None
    if criterion.share:
        return criterion.tolerance * abs(fp32), f"{criterion.tolerance:.3g} of FP32's value, as given"
    return criterion.tolerance, "as given"


# -- the verdict ---------------------------------------------------------------------------------------------------


def _verdict(
    criterion: Criterion,
    own: Account,
    fp32: Account,
    matched: Sequence[Pair],
    dtype: str,
    same: Sameness,
    parted: Parting | None,
    outcome: Outcome | None,
) -> tuple[Blame, str]:
    doubt = _doubt(criterion, own, fp32, matched, same, outcome)
    if doubt is not None:
        return "unknown", doubt
    assert outcome is not None
    name = criterion.metric.replace("grad_norm", "gradient norm")
    ends = f"{name} {number(outcome.own)} as it is, {number(outcome.fp32)} in FP32"
    if dtype == "float32":
        apart = f"; yet they end apart ({ends}): what the script draws or computes is not the same twice"
        if outcome.apart:
            return "unknown", f"nothing in the script was seen to compute in half precision{apart}"
        return "not precision", f"nothing in the script was seen to compute in half precision: both are FP32 ({ends})"
    failed = _failed(criterion, outcome, matched)
    if failed is not None:
        return "not precision", (
            f"FP32 fails too: {failed} ({ends}). Look at what both runs share: the learning rate first, then data and "
            "initialisation"
        )
    end = _ended_early(own)
    if end is not None and fp32.raised is None and len(fp32.points) > len(own.points):
        return "precision", (
            f"as it is the script ended by {end}, after {len(own.points)} updates; with the same data FP32 goes on "
            f"past it ({ends})"
        )
    if not outcome.apart:
        if end is not None:
            return "unknown", f"the script as it is ended by {end}; up to there FP32 does the same ({ends})"
        where = "" if parted is None else f", though they part on the way, at update {parted.update}"
        return "not precision", f"FP32 does the same within {number(outcome.allowed)}{where} ({ends})"
    if criterion.metric == "loss" and not _is_better(outcome.fp32, outcome.own):
        return "not precision", f"FP32 is no better: {ends}"
    if parted is None:
        return "unknown", (
            f"they end apart ({ends}), but nowhere further than rounding errors may add up to in {len(matched)} "
            "updates: run again with another --seed, or longer"
        )
    if same.random is not None and same.random <= parted.update:
        return "unknown", (
            f"they end apart ({ends}), but from update {same.random} on they drew other random numbers: numbers drawn "
            "in half precision are others. Draw them in FP32 and cast, then compare again"
        )
    how = "does better" if criterion.metric == "loss" else "ends elsewhere"
    return "precision", f"with the same data FP32 {how}: {ends}"


def _doubt(
    criterion: Criterion,
    own: Account,
    fp32: Account,
    matched: Sequence[Pair],
    same: Sameness,
    outcome: Outcome | None,
) -> str | None:
    """Why nothing can be said."""
    if fp32.raised is not None and (len(fp32.points) < len(own.points) or not matched):
        error = f"{fp32.raised['type']}: {fp32.raised['message']}"
        done = f" after {len(fp32.points)} updates" if fp32.points else ""
        return f"the FP32 run ended{done} by {error} ({fp32.raised['at']})"
    if not own.points and not fp32.points:
        if own.end is not None and own.end.get("forked"):
            return "no update was seen in the script's own process: those of child processes are not compared"
        return "no update was seen in the script"
    if not matched:
        return (
            "the two runs have no update in common: they make other numbers of backwards an update "
            f"({_ratio(own)} as it is, {_ratio(fp32)} in FP32)"
        )
    if same.start is False:
        return (
            "the two runs began with other parameters: does the script load what it saved, or draw them from a source "
            "that --seed does not reach?"
        )
    if same.data == matched[0][0].attempted:
        return (
            "the two runs had other data from the first update on: seed what draws or shuffles it in the script "
            "(torch, random and numpy's global generator are seeded)"
        )
    if same.data is not None:
        parted_at = parting(matched, precision(own))
        if parted_at is None or same.data <= parted_at.update:
            return f"the two runs had other data from update {same.data} on, before anything else differs"
    if outcome is None:
        who = [a.side for a in (own, fp32) if criterion.metric not in a.metrics]
        if criterion.of_updates:
            return f"no {criterion.metric} was seen in both runs"
        places = " or ".join("as it is" if side == "own" else "in FP32" for side in who)
        return (
            f'no number "{criterion.metric}" was found {places}: print it as "{criterion.metric}: 0.91", or give it to '
            "manager.log"
        )
    return None


def _is_better(one: float, other: float) -> bool:
    """Of two losses (or gradient norms): smaller, finite before anything else."""
    return math.isfinite(one) and (not math.isfinite(other) or one < other)


def _failed(criterion: Criterion, outcome: Outcome, matched: Sequence[Pair]) -> str | None:
    """How FP32 itself failed; None where it did not."""
    if not criterion.of_updates:
        return None if math.isfinite(outcome.fp32) else f"its {criterion.metric} is {outcome.fp32}"
    rise = outcome.fp32 - outcome.first
    noise = max((_WORSE - 1.0) * abs(outcome.first), _NOISE * outcome.spread)
    if math.isfinite(outcome.fp32) and not (criterion.metric == "loss" and rise > noise):
        return None
    losses = [(b.attempted, b.loss) for _, b in matched if b.loss is not None]
    above = next((n for n, loss in losses if not loss <= 2.0 * _WORSE * abs(outcome.first)), None)
    when = "" if above is None else f", more than twice that from update {above} on"
    return f"its loss goes from {number(outcome.first)} to {number(outcome.fp32)}{when}"


def _ended_early(account: Account) -> str | None:
    return None if account.raised is None else f"{account.raised['type']} at {account.raised['at']}"


def _ratio(account: Account) -> str:
    last = account.points[-1] if account.points else None
    return "none" if last is None else f"{last.micro / last.attempted:.3g}"


# -- notes ---------------------------------------------------------------------------------------------------------


def _notes(own: Account, fp32: Account, matched: Sequence[Pair], same: Sameness, parted: Parting | None) -> list[str]:
    """What was seen beside, worth a line each."""
    notes = []
    skipped = [p.attempted for p in own.points if p.outcome == "skipped"]
    if skipped:
        when = f"update {skipped[0]}" if len(skipped) == 1 else f"updates {skipped[0]} to {skipped[-1]}"
        notes.append(f"as it is {len(skipped)} of {len(own.points)} updates were skipped ({when}), none in FP32")
    if same.data is not None and parted is not None and same.data > parted.update:
        notes.append(f"from update {same.data} on the data differ: they follow from what came before")
    if same.random is not None and (parted is None or same.random > parted.update):
        notes.append(f"from update {same.random} on they drew other random numbers")
    left = ", ".join(fp32.halves)
    if left:
        some = f", {fp32.half_parameters} parameter tensors" if fp32.half_parameters else ""
        notes.append(f"not all of the FP32 run was FP32: {left} was still seen in it{some}")
    if fp32.end is not None and fp32.end.get("undone"):
        undone = ", ".join(f"{count:,} {what}" for what, count in sorted(fp32.end["undone"].items()) if count)
        notes.append(f"undone for FP32: {undone}")
    return notes


def number(value: float) -> str:
    return f"{value:.4g}"


__all__ = ["TOLERANCES", "Blame", "Comparison", "Criterion", "Outcome", "judge", "number"]
