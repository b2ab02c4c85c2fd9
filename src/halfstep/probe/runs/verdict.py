"""Is precision to blame? What the two runs, and further ones where they were made, say to the criterion."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from halfstep.checks.rules import RULES
from halfstep.probe.runs.case import Blame, Case, attempted
from halfstep.probe.runs.criterion import Criterion, Outcome, number, optimizers, outcome_of
from halfstep.probe.runs.doubt import doubt, first_apart
from halfstep.probe.runs.notes import notes_of
from halfstep.probe.runs.pair import Account
from halfstep.probe.runs.parting import SURE, Pair, Parting, Sameness, pairs, parting, precision, sameness

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
_TOLD = 4  # optimizers whose acquittal is told
_INTERRUPTED = (130, 143, -2, -15)
_ZERO = 3  # sampled updates in a row
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
    first = beside or ([] if scaled is None else pairs(scaled, fp32))
    reached = None if jittered is None else attempted(jittered)
    if len(beside) < len(matched):
        jittered, beside = None, []  # it did not come as far
    same = sameness(matched, own.half_parameters > 0)
    parted = parting(matched, dtype, beside)
    whole = Case(criterion, own, fp32, matched, dtype, same, parted, reached=reached)
    whole.repeated = next((pair for pair in first if matched and pair[1] is matched[0][1]), None)
    each = []
    for optimizer in optimizers(matched) if criterion.of_updates else [None]:
        outcome = outcome_of(criterion, own, fp32, matched, optimizer)
        if outcome is None and matched and criterion.of_updates:
            continue
        case = replace(whole, outcome=outcome)
        if scaled is not None:
            case.scaled = outcome_of(criterion, own, scaled, pairs(own, scaled), optimizer)
        if jittered is not None:
            case.jittered = outcome_of(criterion, jittered, fp32, beside, optimizer)
        each.append(case)
    for case in each:
        case.several = len(each) > 1
    blame, words, case = _verdict(each or [whole])
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
        notes=tuple(notes_of(own, fp32, same, parted)),
        comparable=case.comparable,
        scaled=scaled,
        jittered=jittered,
        wanted=case.wanted,
    )


# -- the verdict ---------------------------------------------------------------------------------------------------


def _verdict(each: Sequence[Case]) -> tuple[Blame, str, Case]:
    """Of the whole script: the case of the optimizer that decides it is told; ``each``: that of most updates first."""
    case = each[0]
    why = doubt(case)
    if why is not None:
        return "unknown", why, case
    own = case.own
    if not own.points and own.raised is not None:
        error = f"{_ended(own)}: {own.raised['message']}"
        return "precision", f"as it is the script ended by {error}, before any update; FP32 goes on past it", case
    if case.dtype != "float32":
        why = first_apart(case)
        if why is not None:
            case.comparable = False
            return "unknown", why, case
    failures = [_failed(one) for one in each]
    if None in failures:  # one may train against another: what one's loss gains the other's loses
        finite = [one.outcome is not None and math.isfinite(one.outcome.fp32) for one in each]
        failures = [None if kept else failed for failed, kept in zip(failures, finite, strict=True)]
    told = [(*_of_one(one, failed), one) for one, failed in zip(each, failures, strict=True)]
    found = [one for one in told if one[0] == "precision"]
    if found:  # the surest: that which no further run could undo
        return min(found, key=lambda one: one[2].wanted is not None)
    found = [one for one in told if one[0] == "unknown"]
    if found:  # the least settled: a further run may tell
        return min(found, key=lambda one: one[2].wanted is None)
    rest = "".join(f". {words[:1].upper()}{words[1:]}" for _, words, _ in told[1:_TOLD])
    more = f". So it is with {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return "not precision", f"{told[0][1]}{rest}{more}", case


def _of_one(case: Case, failed: str | None) -> tuple[Blame, str]:
    """Of one optimizer, or of a number that the script gave; ``failed``: how FP32 failed."""
    outcome, own, fp32 = case.outcome, case.own, case.fp32
    assert outcome is not None
    ends = case.ends()
    if case.dtype == "float32":
        if outcome.apart:
            return "unknown", (
                f"nothing in the script was seen to compute in half precision, yet they end apart ({ends}): what it "
                "draws or computes is not the same twice"
            )
        return "not precision", f"nothing in the script was seen to compute in half precision: both are FP32 ({ends})"
    better = outcome.apart and case.criterion.is_better(outcome.fp32, outcome.own)
    if fp32.halves and not better:
        return "unknown", (
            f"FP32 is no better ({ends}), but it was not FP32 throughout: {', '.join(fp32.halves)} was still seen in "
            "it. Make the script's half precision an option, and compare with that off"
        )
    starved = None if better else _starved(case, outcome, ends)
    if failed is not None and not (starved is not None and case.several and math.isfinite(outcome.fp32)):
        return "not precision", f"FP32 fails too ({ends}): {failed}"
    end = None if own.raised is None else _ended(own)
    if end is not None and fp32.raised is None and len(fp32.points) > len(own.points):
        return "precision", (
            f"as it is the script ended by {end}, after {len(own.points)} updates; with the same data FP32 goes on "
            f"past it ({ends})"
        )
    other = _stopped(case, ends) or starved
    if other is not None:
        return other
    if not outcome.apart:
        if end is not None:
            return "unknown", f"the script as it is ended by {end}; up to there FP32 does the same ({ends})"
        on_the_way = "" if case.parted is None else f", though they part on the way, at update {case.parted.update}"
        return "not precision", f"FP32 does the same within {number(outcome.allowed)}{on_the_way} ({ends})"
    if not better:
        return "not precision", f"FP32 is no better: {ends}"
    return _decided(case, outcome, ends)


def _ended(account: Account) -> str:
    raised = account.raised or {}
    return f"{raised['type']} at {raised['at']}" if raised["at"] else f"{raised['type']}"


def _stopped(case: Case, ends: str) -> tuple[Blame, str] | None:
    """Whether the script as it is made fewer updates of the same data, by itself: a guard of its own, say, that breaks
    off or passes over what is not finite. None where it is not so."""
    own, fp32, metric = case.own, case.fp32, case.criterion.metric
    made, more = attempted(own), attempted(fp32)
    if made >= more or any(a.end is None or a.raised is not None or a.status in _INTERRUPTED for a in (own, fp32)):
        return None
    if not case.criterion.of_updates and len(own.metrics[metric]) >= len(fp32.metrics[metric]):
        return None  # the number that is judged was given at all its times
    status = f" with exit status {own.status}" if own.status else ""
    words = f"as it is the script stopped{status} after {made} of the {more} updates that FP32 makes ({ends})"
    if fp32.status:
        return "unknown", f"{words}, which ends with exit status {fp32.status} too"
    if case.reached is None:
        case.wanted = "jittered"
        return "unknown", f"{words}: look for what stops or skips in the script, a check of the loss, say"
    if SURE * abs(more - case.reached) < more - made:
        return "precision", (
            f"{words}. It is not chance: FP32 with random errors as large as rounding's in every gradient makes "
            f"{case.reached}. Look for what stops or skips in the script, a check for what is not finite, say"
        )
    return "unknown", f"{words}, but FP32 with random errors makes other numbers of them too, {case.reached}"


def _starved(case: Case, outcome: Outcome, ends: str) -> tuple[Blame, str] | None:
    """Whether the optimizer's whole gradient stays zero as it is, and not in FP32; None where it does not.

    Its loss then tells little where others train beside it, against it even.
    """
    if not case.criterion.of_updates:
        return None
    of_it = [pair for pair in case.matched if pair[0].optimizer == outcome.optimizer]
    norms = [(a.attempted, math.hypot(*a.layers.values()), math.hypot(*b.layers.values())) for a, b in of_it
             if a.layers and b.layers]  # fmt: skip
    lost = list(itertools.takewhile(lambda row: row[1] == 0.0 < row[2], reversed(norms)))
    if len(lost) < _ZERO or 2 * len(lost) < len(norms) or (outcome.apart and not case.several):
        return None
    since, _, fp32 = lost[-1]
    whose = f"optimizer {outcome.optimizer}" if case.several else "the optimizer"
    words = (
        f"{whose} gets no gradient from update {since} on as it is, its norm is 0; in FP32 it is {number(fp32)} there "
        f"({ends})"
    )
    return ("precision" if case.several and 4 * len(lost) >= 3 * len(norms) else "unknown"), words


def _decided(case: Case, outcome: Outcome, ends: str) -> tuple[Blame, str]:
    """FP32 ends better: is it precision, or chance?"""
    if case.same.random is not None and (case.parted is None or case.same.random <= case.parted.update):
        return "unknown", (
            f"they end apart ({ends}), but from update {case.same.random} on they drew other random numbers: numbers "
            "drawn in half precision are others. Draw them in FP32 and cast, then compare again"
        )
    other = _settling(case, outcome, ends) or _mishandled(case, ends)
    if other is not None:
        return other
    way = case.criterion.way()
    how = "does better" if way else "ends elsewhere, and without --better any difference counts"
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


def _settling(case: Case, outcome: Outcome, ends: str) -> tuple[Blame, str] | None:
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


def _mishandled(case: Case, ends: str) -> tuple[Blame, str] | None:
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


def _failed(case: Case) -> str | None:
    """How FP32 itself failed, and where to look then; None where it did not."""
    outcome = case.outcome
    assert outcome is not None
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
