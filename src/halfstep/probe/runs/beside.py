"""A comparison as plain data: what `--json` writes and what the report draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.events import SCHEMA
from halfstep.probe.runs.pair import Account, Point, tail
from halfstep.probe.runs.parting import MEASURE, MEASURED, LayerBeside, Pair, beside
from halfstep.probe.runs.verdict import Comparison

_ROWS = 2000  # updates in the document
_LAYERS = 64  # of one update
_MOMENTS = 12  # updates whose layers are told
_PARTED = ("update", "micro", "what", "layer", "own", "fp32", "allowed")


def document(comparison: Comparison, command: str, status: int) -> dict[str, Any]:
    """Everything there is to show, non-finite numbers as they are."""
    outcome, parted, criterion = comparison.outcome, comparison.parted, comparison.criterion
    return {
        "schema": SCHEMA,
        "command": command,
        "exit": {"code": status, "by": "halfstep"},
        "verdict": {"blame": comparison.blame, "words": comparison.words, "notes": list(comparison.notes)},
        "criterion": {
            "metric": criterion.metric,
            "tolerance": criterion.tolerance,
            "relative": criterion.share,
            "better": criterion.way(),
            **(
                {}
                if outcome is None
                else {
                    "own": outcome.own,
                    "fp32": outcome.fp32,
                    "fp32_at_first": outcome.first,
                    "allowed": outcome.allowed,
                    "how": outcome.how,
                    "updates": outcome.window,
                    "optimizer": outcome.optimizer if _several(comparison) else None,
                }
            ),
        },
        "precision": comparison.dtype,
        "measure": MEASURE if comparison.jittered is None else MEASURED,
        "parted": None
        if parted is None
        else {name: getattr(parted, name) for name in _PARTED}
        | {"optimizer": parted.optimizer if _several(comparison) else None},
        "same": {
            "start": comparison.same.start,
            "data_until": comparison.same.data,
            "random_until": comparison.same.random,
        },
        "runs": {
            account.side: _run(account)
            for account in (comparison.own, comparison.fp32, comparison.scaled, comparison.jittered)
            if account is not None
        },
        "compared": len(comparison.matched),
        "comparable": comparison.comparable,
        "updates": [_pair(pair) for pair in _some(comparison.matched, comparison)],
        "layers": [_layer(layer) for layers in _moments(comparison) for layer in layers[:_LAYERS]],
    }


def _several(comparison: Comparison) -> bool:
    return len({own.optimizer for own, _ in comparison.matched}) > 1


def _run(account: Account) -> dict[str, Any]:
    last = account.points[-1] if account.points else None
    outcomes = Counter(point.outcome for point in account.points)
    end: Mapping[str, Any] = account.end or {}
    failed = account.raised is not None or account.status not in (0, None) or account.end is None
    return {
        "attempted": 0 if last is None else last.attempted,
        "applied": 0 if last is None else last.applied,
        "told": dict(outcomes),
        "micro_batches": 0 if last is None else last.micro,
        "lr": None if last is None else last.lr,
        "scale": None if last is None else last.scale,
        "schedule": None if last is None else last.position,
        "seconds": end.get("seconds"),
        "exit": account.status,
        "raised": None if account.raised is None else dict(account.raised),
        "undone": end.get("undone", {}),
        "metrics": account.metrics,
        "findings": [
            {name: finding.get(name) for name in ("rule", "severity", "message", "at", "count", "fix")}
            for finding in account.verdict.get("findings", [])
        ],
        "output": tail(account.output) if failed else "",
    }


def _pair(pair: Pair) -> dict[str, Any]:
    own, fp32 = pair
    return {"update": own.attempted, "optimizer": own.optimizer, "own": _point(own), "fp32": _point(fp32)}


def _point(point: Point) -> dict[str, Any]:
    names = ("attempted", "applied", "outcome", "micro", "loss", "norm", "scale", "lr", "position")
    return {name: getattr(point, name) for name in names}


def _layer(layer: LayerBeside) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("update", "layer", "own", "fp32", "excess")}


def _some(matched: Sequence[Pair], comparison: Comparison) -> list[Pair]:
    """Evenly, with the ends and the parting among them."""
    if len(matched) <= _ROWS:
        return list(matched)
    stride = math.ceil(len(matched) / _ROWS)
    at = None if comparison.parted is None else comparison.parted.update
    last = len(matched) - 1
    return [pair for n, pair in enumerate(matched) if n % stride == 0 or n == last or pair[0].attempted == at]


def _moments(comparison: Comparison) -> list[list[LayerBeside]]:
    """The layers of some sampled updates: the first, the parting, the last, and some between."""
    sampled = list(beside(comparison.matched, comparison.dtype))
    wanted = {round(n * (len(sampled) - 1) / (_MOMENTS - 1)) for n in range(_MOMENTS)} if len(sampled) > 1 else {0}
    at = None if comparison.parted is None else comparison.parted.update
    return [layers for n, layers in enumerate(sampled) if n in wanted or layers[0].update == at]
