"""Is precision to blame? What the two runs, and further ones where they were made, say to the criterion."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from halfstep.checks.rules import RULES
from halfstep.probe.runs.criterion import Criterion, Outcome, number, outcome_of
from halfstep.probe.runs.pair import Account
from halfstep.probe.runs.parting import SURE, Pair, Parting, Sameness, pairs, parting, precision, sameness

Blame = Literal["precision", "not precision", "unknown"]
_WORSE = 1.05  # times its first loss: a run that ends there has failed
_HALVINGS = 24  # of a scale, in which any can settle
_SINCE = 10  # updates after it that tell something
# What FP32 without a scaler cannot do wrong.
HANDLING = frozenset(RULES["Loss scaling and call order"]) - {
    "fp16-without-scaler",
    "half-parameters-with-scaler",
    "loss-scale-collapse",
    "nonfinite-update-applied",
    "scaler-without-fp16",
}
_SPIKES = 5  # updates whose median no spike moves
_NOISY = 3.0  # and so many times as much above it as the loss usually moves from one update to the next


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs, what they share, where they part, and the verdict in words.

    ``comparable``: they began alike and had data in common; ``scaled``, ``jittered``: further runs, where they were
    made (see `halfstep.probe.runs.side.SIDES`); ``wanted``: one that would decide.
    """

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
    comparable: bool = True
    scaled: Account | None = None
    jittered: Account | None = None
    wanted: str | None = None


def judge(
    criterion: Criterion, own: Account, fp32: Account, scaled: Account | None = None, jittered: Account | None = None
) -> Comparison:
    """Set two runs side by side, and further ones where they were made, and say whether precision is to blame."""
    matched, dtype = pairs(own, fp32), precision(own)
    beside = [] if jittered is None else pairs(jittered, fp32)
    if len(beside) < len(matched):
        jittered, beside = None, []  # it did not come as far
    same = sameness(matched, own.half_parameters > 0)
    parted = parting(matched, dtype, beside)
    case = _Case(criterion, own, fp32, matched, dtype, same, parted, outcome_of(criterion, own, fp32, matched))
    if scaled is not None:
        case.scaled = outcome_of(criterion, own, scaled, pairs(own, scaled))
    if jittered is not None:
        case.jittered = outcome_of(criterion, jittered, fp32, beside)
    blame, words = _verdict(case)
    if not case.comparable:
        parted = None
    return Comparison(
        criterion,
        own,
        fp32,
        matched,
        dtype,
        same,
        parted,
        case.outcome,
        blame,
        words,
        notes=tuple(_notes(own, fp32, same, parted)),
        comparable=case.comparable,
        scaled=scaled,
        jittered=jittered,
        wanted=case.wanted,
    )


@dataclass(slots=True)
class _Case:
    """All that the verdict rests on. ``scaled``: the script as it is beside FP32 with its scalers left on."""

    criterion: Criterion
    own: Account
    fp32: Account
    matched: Sequence[Pair]
    dtype: str
    same: Sameness
    parted: Parting | None
    outcome: Outcome | None
    scaled: Outcome | None = None
    jittered: Outcome | None = None
    wanted: str | None = None
    comparable: bool = True


# -- the verdict ---------------------------------------------------------------------------------------------------


def _verdict(case: _Case) -> tuple[Blame, str]:
    doubt = _doubt(case)
    if doubt is not None:
        return "unknown", doubt
    outcome, own, fp32 = case.outcome, case.own, case.fp32
    if not own.points and own.raised is not None:
        error = f"{own.raised['type']} at {own.raised['at']}: {own.raised['message']}"
        return "precision", f"as it is the script ended by {error}, before any update; FP32 goes on past it"
    assert outcome is not None
    name = case.criterion.metric.replace("grad_norm", "gradient norm")
    ends = f"{name} {number(outcome.own)} as it is, {number(outcome.fp32)} in FP32"
    if case.dtype == "float32":
        if outcome.apart:
            return "unknown", (
                f"nothing in the script was seen to compute in half precision, yet they end apart ({ends}): what it "
                "draws or computes is not the same twice"
            )
        return "not precision", f"nothing in the script was seen to compute in half precision: both are FP32 ({ends})"
    if fp32.halves and not (outcome.apart and _is_better(outcome.fp32, outcome.own)):
        return "unknown", (
            f"FP32 is no better ({ends}), but it was not FP32 throughout: {', '.join(fp32.halves)} was still seen in "
            "it. Make the script's half precision an option, and compare with that off"
        )
    failed = _failed(case, outcome)
    if failed is not None:
        return "not precision", f"FP32 fails too ({ends}): {failed}"
    end = None if own.raised is None else f"{own.raised['type']} at {own.raised['at']}"
    if end is not None and fp32.raised is None and len(fp32.points) > len(own.points):
        return "precision", (
            f"as it is the script ended by {end}, after {len(own.points)} updates; with the same data FP32 goes on "
            f"past it ({ends})"
        )
    if not outcome.apart:
        if end is not None:
            return "unknown", f"the script as it is ended by {end}; up to there FP32 does the same ({ends})"
        on_the_way = "" if case.parted is None else f", though they part on the way, at update {case.parted.update}"
        return "not precision", f"FP32 does the same within {number(outcome.allowed)}{on_the_way} ({ends})"
    if case.criterion.metric == "loss" and not _is_better(outcome.fp32, outcome.own):
        return "not precision", f"FP32 is no better: {ends}"
    return _decided(case, outcome, ends)


def _decided(case: _Case, outcome: Outcome, ends: str) -> tuple[Blame, str]:
    """FP32 ends better: is it precision, or chance?"""
    if case.same.random is not None and (case.parted is None or case.same.random <= case.parted.update):
        return "unknown", (
            f"they end apart ({ends}), but from update {case.same.random} on they drew other random numbers: numbers "
            "drawn in half precision are others. Draw them in FP32 and cast, then compare again"
        )
    other = _settling(case, outcome, ends) or _mishandled(case, ends)
    if other is not None:
        return other
    how = "does better" if case.criterion.metric == "loss" else "ends elsewhere"
    jittered = case.jittered
    if jittered is None:
        case.wanted = "jittered"
        if case.parted is None:
            return "unknown", (
                f"they end apart ({ends}), but nowhere further than rounding errors may add up to in "
                f"{len(case.matched)} updates"
            )
        return "precision", f"with the same data FP32 {how}: {ends}"
    third = f"FP32 with random errors as large as rounding's in every gradient ends at {number(jittered.own)}"
    distance = abs(outcome.own - outcome.fp32) if math.isfinite(outcome.own) else math.inf
    if math.isfinite(jittered.own) and distance > SURE * abs(jittered.own - outcome.fp32):
        return "precision", f"with the same data FP32 {how}: {ends}. It is not chance: {third}"
    return "unknown", (
        f"they end apart ({ends}), but so do runs that differ by chance: {third}. The training is that sensitive: "
        "compare the mean of several --seed, or a lower learning rate"
    )


def _settling(case: _Case, outcome: Outcome, ends: str) -> tuple[Blame, str] | None:
    """Whether all that is lost are updates skipped while the loss scale settled; None where it is not.

    Then the script as it is stands where FP32 stood so many updates before.
    """
    points = [a for a, _ in case.matched if a.optimizer == outcome.optimizer]
    skipped = [n for n, point in enumerate(points) if point.outcome == "skipped"]
    count, since = len(skipped), len(points) - 1 - (skipped[-1] if skipped else 0)
    if not 0 < count <= _HALVINGS or skipped[-1] > 2 * count + 1 or case.criterion.metric != "loss":
        return None
    if not all(math.isfinite(points[n].loss or 0.0) for n in skipped):
        return None  # no scale cures an overflow of the forward
    if since < max(_SINCE, count):
        return "unknown", (
            f"they end apart ({ends}), but the loss scale settled for {count} updates and only {since} were made "
            "since: compare more updates"
        )
    if outcome.behind(count) is not True:
        return None
    return "not precision", (
        f"as it is the script is {count} updates behind, skipped while the loss scale settled, and otherwise does what "
        f"FP32 does ({ends}). A lower init_scale saves them"
    )


def _mishandled(case: _Case, ends: str) -> tuple[Blame, str] | None:
    """Whether FP32 is better only because it does without the loss scale; None where that is not so."""
    named = [
        f"{finding['rule']} at {finding['at']['file'].rpartition('/')[2]}:{finding['at']['line']}"
        for finding in case.own.verdict.get("findings", [])
        if finding["rule"] in HANDLING and finding["severity"] != "info" and finding["at"] is not None
    ]
    if not named or all(point.scale is None for point in case.own.points):
        return None
    rules = ", ".join(dict.fromkeys(named))
    if case.scaled is None:
        case.wanted = "scaled"
        return "unknown", (
            f"they end apart ({ends}), but the script mishandles its loss scale, which FP32 does without: {rules}. "
            "Mend that and compare again"
        )
    if case.scaled.apart:
        return None
    return "not precision", (
        f"it is not rounding: FP32 with the script's loss scaler on ends at {number(case.scaled.fp32)} ({ends}). The "
        f"loss scale is mishandled: {rules}"
    )


def _doubt(case: _Case) -> str | None:
    """Why nothing can be said."""
    criterion, own, fp32, matched, same = case.criterion, case.own, case.fp32, case.matched, case.same
    case.comparable = False
    if fp32.raised is not None and (len(fp32.points) < len(own.points) or not matched):
        error = f"{fp32.raised['type']}: {fp32.raised['message']}"
        done = f" after {len(fp32.points)} updates" if fp32.points else ""
        return f"the FP32 run ended{done} by {error} ({fp32.raised['at']})"
    if not own.points and own.raised is not None and fp32.raised is None and fp32.points:
        return None
    if not own.points and not fp32.points:
        status = own.status or 0
        ended = f": it ended by signal {-status}" if status < 0 else f": it ended with exit status {status}"
        return f"no update was seen in the script's own process{ended if status else ''}"
    if not fp32.points:
        return f"as it is the script made {len(own.points)} updates; FP32 was not reached"
    if not matched:
        return (
            "the two runs have no update in common: they make other numbers of backwards an update "
            f"({_backwards(own)} as it is, {_backwards(fp32)} in FP32)"
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
    case.comparable = True
    if same.data is not None and (case.parted is None or same.data <= case.parted.update):
        return f"the two runs had other data from update {same.data} on, before anything else differs"
    if case.outcome is None:
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


def _failed(case: _Case, outcome: Outcome) -> str | None:
    """How FP32 itself failed, and where to look then; None where it did not."""
    if not case.criterion.of_updates:
        return None if math.isfinite(outcome.fp32) else f"its {case.criterion.metric} is {outcome.fp32}"
    losses = [(b.attempted, b.loss) for _, b in case.matched if b.optimizer == outcome.optimizer and b.loss is not None]
    if not losses:
        return None
    first, ends = losses[0][1], outcome.fp32
    if math.isfinite(ends):
        moves = [abs(b - a) for (_, a), (_, b) in pairwise(losses) if math.isfinite(a) and math.isfinite(b)]
        noise = max((_WORSE - 1.0) * abs(first), _NOISY * median(moves or [0.0]))
        ends = median(loss for _, loss in losses[-max(_SPIKES, outcome.window) :])
        if case.criterion.metric != "loss" or not ends - first > noise:
            return None
    before = itertools.takewhile(lambda row: math.isfinite(row[1]), losses)
    grown = next((n for n, loss in before if loss > 2.0 * _WORSE * abs(first)), None)
    if grown is None:
        return (
            f"its loss goes from {number(first)} to {number(ends)} without growing before. Look for what is not finite "
            "in any precision: the data, a division, a root; the doctor says more"
        )
    return (
        f"its loss goes from {number(first)} to {number(ends)}, more than twice that from update {grown} on. Look at "
        "what both runs share: the learning rate first, then data and initialisation"
    )


def _backwards(account: Account) -> str:
    last = account.points[-1] if account.points else None
    return "none" if last is None else f"{last.micro / last.attempted:.3g}"


# -- notes ---------------------------------------------------------------------------------------------------------


def _notes(own: Account, fp32: Account, same: Sameness, parted: Parting | None) -> list[str]:
    """What was seen beside, worth a line each."""
    notes = []
    skipped = [p.attempted for p in own.points if p.outcome == "skipped"]
    if skipped:
        when = f"update {skipped[0]}" if len(skipped) == 1 else f"updates {skipped[0]} to {skipped[-1]}"
        others = sum(p.outcome == "skipped" for p in fp32.points) or "none"
        notes.append(f"as it is {len(skipped)} of {len(own.points)} updates were skipped ({when}), {others} in FP32")
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
