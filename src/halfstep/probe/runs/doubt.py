"""Why nothing can be said of two runs: they were not the same script on the same data, or told too little."""

from __future__ import annotations

import math

from halfstep.probe.runs.case import Case
from halfstep.probe.runs.criterion import number
from halfstep.probe.runs.pair import Account, Point
from halfstep.probe.runs.parting import TOLERANCES

_REPEATS = 1e-3  # of a first loss, that two FP32 runs of one script may be apart: atomics add in any order


def doubt(case: Case) -> str | None:
    """Why nothing can be said."""
    criterion, own, fp32, matched, same = case.criterion, case.own, case.fp32, case.matched, case.same
    case.comparable = False
    if fp32.raised is not None and (len(fp32.points) < len(own.points) or not matched):
        error = f"{fp32.raised['type']}: {fp32.raised['message']}"
        place = f" ({fp32.raised['at']})" if fp32.raised["at"] else ""
        done = f" after {len(fp32.points)} updates" if fp32.points else ""
        both = own.raised is not None and own.raised["type"] == fp32.raised["type"]
        closed = ". Their standard input is empty: give the answers as arguments, or in a file"
        read = closed if fp32.raised["type"] == "EOFError" else ""
        return f"{'both runs' if both else 'the FP32 run'} ended{done} by {error}{place}{read}"
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


def first_apart(case: Case) -> str | None:
    """Why the runs may have had other data that nobody saw: before any training, equal parameters gave another loss.

    A further run, in FP32 too, tells: a script that is the same twice repeats FP32's first loss.
    """
    own, fp32 = case.matched[0]
    tau = TOLERANCES[case.dtype]
    if own.attempted != 1 or fp32.attempted != 1:
        return None  # what they have in common begins after some training
    if case.repeated is not None:
        again, once = case.repeated
        if _far(again.loss, once.loss, _REPEATS) or _far(_total(again), _total(once), 10.0 * _REPEATS):
            return (
                "the script is not the same twice: its first update gave "
                f"{_shown(once)} in FP32 and {_shown(again)} in FP32 again, from equal parameters. Its data, targets "
                "or noise come from a source that --seed does not reach: seed it in the script"
            )
        return None
    unseen = all(p.data is None or (p.data[0] == 0.0 and p.data[2] == 0.0) for p in (own, fp32))
    if not _far(own.loss, fp32.loss, tau) and not (unseen and _far(_total(own), _total(fp32), tau)):
        return None
    case.wanted = "jittered"
    return (
        f"already their first update, from equal parameters, gave {_shown(own)} as it is and {_shown(fp32)} in FP32: "
        "half precision spoils the forward, or data, targets or noise come from a source that --seed does not reach; "
        "a further run in FP32 would tell"
    )


def _far(one: float | None, other: float | None, share: float) -> bool:
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return False
    return abs(one - other) > share * max(abs(one), abs(other))


def _total(point: Point) -> float | None:
    return math.hypot(*point.layers.values()) if point.layers else None


def _shown(point: Point) -> str:
    norm = _total(point)
    loss = "no loss" if point.loss is None else f"loss {number(point.loss)}"
    return loss if norm is None else f"{loss} (gradient norm {number(norm)})"


def _backwards(account: Account) -> str:
    last = account.points[-1] if account.points else None
    return "none" if last is None else f"{last.micro / last.attempted:.3g}"
