"""Every rule by name: its family and what a finding of it rests on. The names are fixed; pages explain each."""

from __future__ import annotations

from importlib.resources import files

RULES: dict[str, dict[str, str]] = {
    "Loss scaling and call order": {
        "clip-scaled-gradients": (
            "gradients clipped by norm or value while still multiplied by the loss scale (a threshold that is "
            "itself scaled is right)"
        ),
        "clip-after-update": "clipping after the update that used the gradients",
        "clip-mid-group": "clipping by norm between contributions of one group",
        "unscale-mid-group": (
            "unscale_ before the group's last contribution; later contributions are added at another scale, or "
            "torch raises"
        ),
        "scaler-update-missing": "attempts not followed by scaler.update(), a hand-made skip included",
        "scaler-update-mid-group": "the scale may move while contributions are pending",
        "scaler-update-between-optimizers": "update() between two optimizers whose gradients came from one scale",
        "scaler-update-without-step": "update() when nothing was unscaled or stepped since the last one",
        "scaler-sees-no-gradients": (
            "the optimizer owns no parameter that received a gradient (stale, replaced or detached parameters)"
        ),
        "optimizer-step-bypasses-scaler": "optimizer.step() on gradients that carry the loss scale",
        "scaler-recreated": "a new scaler in the middle of a run: the scale found so far is thrown away",
        "scaler-not-restored": "a resumed run loads model and optimizer but starts a fresh scaler",
        "scaler-without-fp16": "loss scaling while no FP16 computation takes place (bf16, fp32)",
        "half-parameters-with-scaler": (
            "parameters themselves are FP16 or BF16 and a scaler is used ('not implemented for BFloat16' included)"
        ),
        "fp16-without-scaler": (
            "FP16 contributions with no loss scale, and gradients that underflow to zero because of it"
        ),
        "closure-optimizer-with-scaler": "closure-driven optimizers (LBFGS) with loss scaling",
        "two-step-optimizer-with-scaler": (
            "ascend/descend optimizers (SAM) stepped on scaled gradients or through a stale unscale"
        ),
        "scaled-gradients-in-loss": "autograd.grad of a scaled output enters a loss without being divided by the scale",
        "scaled-gradients-read": "gradient statistics read for logging or decisions while scaled",
        "fused-momentum-after-skip": (
            "fused SGD with momentum whose first attempt was skipped: its momentum starts from garbage"
        ),
        "nonfinite-update-applied": "no scaler, and an update wrote non-finite values into parameters",
        "loss-scale-collapse": (
            "the scale keeps halving without recovering; names what produces the non-finite value, and whether "
            "weights or activations grew before it (too high a learning rate) (healthy settling at the start is "
            "not this)"
        ),
        "loss-scales-differ-across-ranks": "replicas hold different scales",
        "skip-differs-across-ranks": "replicas disagree on whether an update was applied",
    },
    "Accumulation and denominators": {
        "zero-grad-mid-group": "gradients cleared between contributions of one group",
        "optimizer-step-every-micro-batch": (
            "accumulation intended (loss divided by A) but every contribution is stepped at once"
        ),
        "gradients-never-cleared": "updates add to the gradients of earlier updates, run after run",
        "skipped-gradients-kept": "gradients of a skipped update stay and spoil the next",
        "leftover-micro-batches": "contributions of an unfinished group leak into the next epoch's first update",
        "foreign-gradients": "an optimizer steps on gradients that another loss's backward left there",
        "partial-group-underweighted": "a short last group divided by the full A",
        "loss-not-divided": "mean losses of a group summed without division",
        "loss-divided-twice": "the group's weights add up to 1/A (tool and script both divide)",
        "mean-of-means": "weights of micro-batches not in proportion to their supervised elements",
        "mean-of-means-across-replicas": "the same across replicas",
        "ignored-positions-counted": (
            "padding or masked positions carry weight in the loss (reduction none then mean, or supervised masks)"
        ),
        "parameters-change-mid-group": "parameters change between contributions of one group",
        "half-gradient-accumulation": "gradients themselves accumulate in BF16/FP16 over many contributions",
        "loss-divided-by-world-size": "divided by D although the backend averages",
        "no-supervised-elements": (
            "a micro-batch or group supervises nothing (NaN loss, or a silent zero gradient): say which"
        ),
        "batchnorm-under-accumulation": (
            "batch statistics of small micro-batches in a group: a warning where the measured gradient differs "
            "from the big batch's by more than 5e-3 in FP16, 3e-2 in BF16, 1e-5 in FP32, else info"
        ),
    },
    "Schedules and parameters": {
        "scheduler-on-skipped-update": "a per-update schedule advances on skipped updates",
        "scheduler-per-micro-batch": "a schedule meant for updates advances with every micro-batch",
        "schedule-never-finishes": "the schedule's length is A or D times the updates that run, or a fraction of it",
        "epoch-order-repeats": (
            "a second epoch through a distributed or seeded sampler whose epoch was not set: the same order again"
        ),
        "evaluation-mode-kept": (
            "training updates while the model is in evaluation mode, or evaluation in training mode"
        ),
        "ema-per-micro-batch": "an average of weights updated with every micro-batch, or on skipped updates",
        "frozen-parameters-move": "parameters meant frozen change (decay or momentum on zero gradients)",
        "updates-rounded-away": "updates (or EMA) smaller than the spacing of a BF16/FP16 parameter: it stands still",
        "no-master-weights": (
            "trainable parameters in BF16/FP16 under autocast, with no FP32 copy (info when intended by a "
            "stochastic-rounding or Kahan optimizer)"
        ),
        "optimizer-state-in-half": "a second moment in BF16/FP16 whose decay rounds to nothing",
    },
    "Numbers": {
        "forward-overflow": (
            "the first operator, module and line whose finite inputs gave a non-finite output, or whose values "
            "left the dtype's range"
        ),
        "nonfinite-inputs": "a micro-batch or parameter that is already non-finite before the first operator",
        "backward-nonfinite": "the same in backward: the first gradient operator that made it",
        "gradient-underflow": "share of gradient elements lost to zero in half precision that FP32 keeps, by layer",
        "half-constant-overflow": "a constant (mask fill, clamp bound) outside the dtype's range",
        "fully-masked-softmax": "a softmax row with nothing left",
        "saturated-half-probabilities": "a loss on half-precision probabilities rounded to 0 or 1",
        "epsilon-underflow": "an epsilon that rounds to zero in the dtype it is added in (optimizer eps included)",
        "half-reduction-overflow": "a sum or mean in half precision that leaves the range",
        "low-precision-accumulator": "a running total in BF16/FP16 that no longer grows",
        "positions-in-low-precision": "integer-valued positions or counters that collide in BF16/FP16",
        "poisoned-running-statistics": "BatchNorm statistics hit by a batch whose update was skipped",
        "clip-spreads-nonfinite": "a non-finite norm turns every gradient non-finite, and nothing skips the update",
        "half-unsupported-operator": "an operator without half support fed by autocast",
    },
    "Modes and distribution": {
        "custom-function-dtype": "a custom autograd function without custom_fwd/custom_bwd meets mixed dtypes",
        "autocast-off-needs-float": "a region with autocast off receives half-precision inputs",
        "autocast-around-loop": "one autocast region spans updates: cached casts of weights go stale",
        "backward-under-autocast": (
            "backward runs inside the autocast region (outside is the contract; custom functions and second "
            "derivatives change dtype)"
        ),
        "autocast-lost-in-thread": "forwards in threads that do not inherit autocast",
        "autocast-wrong-device": (
            "autocast is on, yet no operator ran in half precision (another device type than the data, or a "
            "scaler that switched itself off)"
        ),
        "checkpoint-loses-autocast": "recomputed activations have another dtype than the first forward",
        "checkpoint-changes-randomness": "recomputed dropout or noise differs from the first forward",
        "compiled-autocast-mismatch": "a compiled backward computes an FP32 region in half precision",
        "loss-history-keeps-graph": (
            "tensors with their graph are retained across micro-batches or updates (memory grows)"
        ),
        "no-sync-without-forward": "no_sync around backward only: nothing is saved, or gradients are wrong",
        "replica-bypassed": "forward through ddp.module: gradients are not reduced",
        "unused-parameters": "parameters that get no gradient under DDP",
        "duplicate-examples-across-replicas": (
            "two ranks saw the same example in one update (info when sampling with replacement)"
        ),
        "parameters-differ-across-ranks": "replicas' parameters have drifted apart",
        "logged-loss-misleading": (
            "info: the value printed or logged as loss carries 1/A or the scale, or is the last micro-batch's alone"
        ),
    },
}


def sees(rule: str) -> str | None:
    """What a finding of this rule rests on; None for a rule that is not ours."""
    return next((family[rule] for family in RULES.values() if rule in family), None)


def page(rule: str) -> str | None:
    """The rule's page as Markdown: what it is, how it hurts, the fix, a broken and a right example."""
    file = files("halfstep.checks") / "pages" / f"{rule}.md"
    return file.read_text(encoding="utf-8") if file.is_file() else None
