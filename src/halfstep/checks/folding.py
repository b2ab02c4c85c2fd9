"""One cause, one finding: what follows from a fault is not told beside it.

``CONSEQUENCES`` names, for each rule, the rules whose findings it explains; they are left out where it was found.
The more specific of two rules that fit stands on the left.
"""

from __future__ import annotations

from halfstep.events import Finding

# What non-finite values come from, and what they lead to.
_NONFINITE = (
    "forward-overflow",
    "nonfinite-inputs",
    "half-constant-overflow",
    "fully-masked-softmax",
    "saturated-half-probabilities",
    "epsilon-underflow",
    "half-reduction-overflow",
    "no-supervised-elements",
    "backward-nonfinite",
    "clip-spreads-nonfinite",
)
_SPREADS = frozenset({"nonfinite-update-applied", "loss-scale-collapse"})
_BY_CLOSURE = frozenset(
    {
        "optimizer-step-bypasses-scaler",
        "clip-scaled-gradients",
        "scaled-gradients-read",
        "scaler-update-without-step",
        "scaler-update-missing",
        "unscale-mid-group",
        "nonfinite-update-applied",
    }
)
_WEIGHTS = (
    "optimizer-step-every-micro-batch",
    "partial-group-underweighted",
    "loss-not-divided",
    "loss-divided-twice",
    "mean-of-means",
)
_DRIFT = frozenset({"parameters-differ-across-ranks"})
_WAITING = frozenset({"scaler-update-mid-group", "scaler-update-between-optimizers", "unscale-mid-group"})

CONSEQUENCES: dict[str, frozenset[str]] = {
    "unscale-mid-group": frozenset(
        {
            "scaler-update-mid-group",
            "clip-mid-group",
            "clip-scaled-gradients",  # of what was added after it
            "scaler-update-missing",
            "scaled-gradients-read",
        }
    ),
    "clip-scaled-gradients": frozenset({"clip-mid-group", "scaled-gradients-read"}),
    "closure-optimizer-with-scaler": _BY_CLOSURE | {*_SPREADS, *_NONFINITE},
    "two-step-optimizer-with-scaler": _BY_CLOSURE | {"parameters-change-mid-group", *_SPREADS, *_NONFINITE},
    "scaled-gradients-in-loss": frozenset({*_SPREADS, *_NONFINITE}),
    "optimizer-step-bypasses-scaler": frozenset(
        {"scaler-update-without-step", "clip-scaled-gradients", "scaled-gradients-read", *_SPREADS, *_NONFINITE}
    ),
    "scaler-sees-no-gradients": frozenset({"scaler-update-without-step"}),
    "scaler-update-between-optimizers": frozenset({"scaler-update-mid-group"}),
    "scaler-update-missing": frozenset({"scaled-gradients-read"}),
    "half-parameters-with-scaler": frozenset(
        {
            "scaler-without-fp16",
            "no-master-weights",
            "half-gradient-accumulation",
            "optimizer-state-in-half",
            "updates-rounded-away",
        }
    ),
    "fp16-without-scaler": frozenset({"gradient-underflow"}),
    "fused-momentum-after-skip": frozenset({*_SPREADS, *_NONFINITE}),
    "loss-scale-collapse": frozenset({"backward-nonfinite", "gradient-underflow", "nonfinite-update-applied"}),
    "zero-grad-mid-group": frozenset(
        {"scaler-update-missing", "scheduler-on-skipped-update", "scaler-sees-no-gradients", *_WEIGHTS}
    ),
    "foreign-gradients": _WAITING | {"zero-grad-mid-group", "gradients-never-cleared"},
    "leftover-micro-batches": _WAITING | {"mean-of-means", "partial-group-underweighted"},
    "gradients-never-cleared": frozenset(
        {"leftover-micro-batches", "foreign-gradients", *_WAITING, *_SPREADS, *_WEIGHTS, *_NONFINITE}
    ),
    "skipped-gradients-kept": frozenset(
        {
            "scaler-update-missing",
            "gradients-never-cleared",
            "leftover-micro-batches",
            *_WEIGHTS,
            *_SPREADS,
            *_NONFINITE,
        }
    ),
    "optimizer-step-every-micro-batch": frozenset(
        {"gradients-never-cleared", "scheduler-per-micro-batch", "ema-per-micro-batch", "schedule-never-finishes"}
    ),
    "half-gradient-accumulation": frozenset({"no-master-weights"}),
    "updates-rounded-away": frozenset({"no-master-weights", "half-gradient-accumulation"}),
    "optimizer-state-in-half": frozenset({"no-master-weights", "updates-rounded-away"}),
    "scheduler-per-micro-batch": frozenset({"scheduler-on-skipped-update", "schedule-never-finishes"}),
    **dict.fromkeys(_NONFINITE, _SPREADS),
    "forward-overflow": _SPREADS | {"backward-nonfinite"},
    "half-constant-overflow": _SPREADS | {"fully-masked-softmax", "backward-nonfinite"},
    "fully-masked-softmax": _SPREADS | {"backward-nonfinite"},
    "saturated-half-probabilities": _SPREADS | {"backward-nonfinite"},
    "epsilon-underflow": _SPREADS
    | {"backward-nonfinite", "no-master-weights", "optimizer-state-in-half", "half-gradient-accumulation"},
    "backward-nonfinite": _SPREADS | {"ignored-positions-counted"},
    "clip-spreads-nonfinite": _SPREADS | {"forward-overflow", "backward-nonfinite", "half-reduction-overflow"},
    "no-supervised-elements": _SPREADS | {"mean-of-means", "backward-nonfinite", "clip-spreads-nonfinite"},
    "loss-not-divided": frozenset({"mean-of-means"}),
    "loss-divided-twice": frozenset({"mean-of-means"}),
    "partial-group-underweighted": frozenset({"mean-of-means"}),
    # Replicas: what one rank does that the others do not makes their parameters differ.
    "replica-bypassed": _DRIFT,
    "unused-parameters": _DRIFT,
    "skip-differs-across-ranks": frozenset({"loss-scales-differ-across-ranks", *_DRIFT, *_SPREADS, *_NONFINITE}),
    "loss-scales-differ-across-ranks": _DRIFT | {"skip-differs-across-ranks", "loss-scale-collapse"},
    "loss-divided-by-world-size": frozenset(
        {"loss-divided-twice", "optimizer-step-every-micro-batch", "partial-group-underweighted"}
    ),
    "autocast-around-loop": frozenset({"backward-under-autocast"}),
    "custom-function-dtype": frozenset({"half-unsupported-operator"}),
    "autocast-off-needs-float": frozenset({"half-unsupported-operator"}),
    "checkpoint-loses-autocast": frozenset({"half-unsupported-operator"}),
    "autocast-wrong-device": frozenset({"fp16-without-scaler", "scaler-without-fp16", "gradient-underflow"}),
}


_GROWTH = frozenset({"forward-overflow", "backward-nonfinite", "half-reduction-overflow"})
_RARE = 2  # batches that poisoned statistics, when the statistics are what is wrong


def fold(findings: list[Finding]) -> list[Finding]:
    """The findings without those that another of them explains."""
    if any(f.rule == "poisoned-running-statistics" for f in findings):
        findings = _batch_or_statistics(findings)
    empty = {f.at for f in findings if f.rule == "no-supervised-elements"}
    findings = [f for f in findings if not (f.rule == "forward-overflow" and f.at in empty)]  # 0 / 0 there
    present = {f.rule for f in findings}
    if any(f.rule in _SPREADS and f.evidence.get("grew") for f in findings):
        present -= _GROWTH  # what overflows when values grow is a consequence
        findings = [f for f in findings if f.rule not in _GROWTH]
    elif "loss-scale-collapse" in present:
        present.discard("backward-nonfinite")
    explained = {rule for cause in present for rule in CONSEQUENCES.get(cause, frozenset()) if rule != cause}
    return [f for f in findings if f.rule not in explained]


def _batch_or_statistics(findings: list[Finding]) -> list[Finding]:
    """A rare batch that a skip would have mended but for the statistics, or values that never are finite."""
    causes = [f for f in findings if f.rule in _NONFINITE]
    if sum(f.count for f in causes) <= _RARE:
        return [f for f in findings if f.rule not in _NONFINITE]
    return [f for f in findings if f.rule != "poisoned-running-statistics"]
