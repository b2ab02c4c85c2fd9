"""The rows of a preflight's table, from what a flight has seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.group import examples_of
from halfstep.errors import NonFiniteError, WeightError
from halfstep.probe.difference import Cause
from halfstep.probe.preflight import initialisation
from halfstep.probe.preflight.checklist import Row, failed, not_judged, size, some
from halfstep.probe.preflight.examples import fingerprints, nonfinite, repeated, same
from halfstep.probe.preflight.flight import MOST, Flight
from halfstep.probe.preflight.rehearsal import Rehearsal
from halfstep.probe.same_update import SameUpdate
from halfstep.probe.trial import TOLERANCES, norm


def rows(flight: Flight, big: Any) -> list[Row]:
    """Every row, in the order of the table."""
    half = flight.twin.precision.dtype
    table = [
        _examples(flight, big),
        _weights(flight),
        flight.problem or _gradient(flight.same_update),
        _update(flight),
        _finite(flight),
        _boundaries(flight),
        _memory(flight),
        initialisation.parameters(flight.module, half),
    ]
    if flight.unseen:
        table += [not_judged("activations", flight.unseen), not_judged("layers", flight.unseen)]
    else:
        unreached = [name for name in flight.found.zero if name in flight.unreached]
        dead = [name for name in flight.found.dead if name not in unreached]
        table += [
            initialisation.activations(flight.layers, half, flight.scale),
            initialisation.chain(flight.layers, flight.found.zero, dead, unreached),
        ]
    islands = _islands(flight)
    return table if islands is None else [*table, islands]


def _examples(flight: Flight, big: Any) -> Row:
    prints = [fingerprints(batch) for batch in flight.batches]
    counts = [examples_of(batch) for batch in flight.batches]
    known = [count for count in counts if count is not None]
    total = sum(known) if len(known) == len(counts) else None
    more = f" (the first {MOST}; more were given)" if flight.more else ""
    seen = f"{len(flight.batches)} micro-batches{more} of {_listed(counts)} examples"
    numbers: dict[str, Any] = {"micro_batches": len(flight.batches), "examples": total}
    group = counts[: flight.size]
    numbers["examples_of_group"] = None if None in group else sum(count or 0 for count in group)
    if big is not None and None not in group:
        whole = examples_of(big)
        expected = numbers["examples_of_group"]
        if whole != expected:
            return Row(
                "examples",
                "fail",
                f"{seen}; the big batch holds {whole}, the group {expected}",
                "big= must hold the group's examples, each once",
                numbers,
            )
        content = fingerprints(big)
        alike = same(prints[: flight.size], content)
        seen += "; the big batch holds the same" if alike else "; as many in the big batch (padded, so not compared)"
    if flight.ids is not None:
        prints = flight.example_ids()
        numbers["distinct"] = len({entry for entries in prints for entry in entries})
    twice = repeated(prints)
    if twice:
        entry, where = twice[0]
        what = f"id {entry}" if flight.ids is not None else "one"
        places = " and ".join(str(position + 1) for position in sorted(set(where)))
        seen += f"; {len(twice)} occur more than once ({what} in micro-batch {places})"
        return Row(
            "examples",
            "fail" if flight.ids is not None else "note",
            seen,
            "a sampler that repeats or overlaps: each example belongs into one micro-batch of an epoch",
            numbers,
        )
    return Row("examples", "pass", seen + ("; all different" if any(prints) else ""), "", numbers)


def _weights(flight: Flight) -> Row:
    twin, found = flight.twin, flight.found
    if isinstance(found.refused, WeightError):
        return failed("weights", found.refused)
    report = twin.report()["normalisation"]
    why = report["counted_examples_instead"]
    numbers = {"weights": found.weights, "source": found.source, "verdict": report["verdict"]}
    if found.first is None:
        return not_judged("weights", _refused(found))
    if found.first.empty:
        return Row(
            "weights", "fail", "nothing is supervised in the first group", "micro-batches that hold targets", numbers
        )
    shown = _listed([int(w) if float(w).is_integer() else w for w in found.weights or []]) or "none"
    seen = f"{shown}{' in the first group' if len(flight.batches) > flight.size else ''}, {found.source}"
    if why:
        return Row("weights", "note", f"{seen}: {why}", "weight= counts the supervised elements", numbers)
    notes = [note for note in twin.report()["notes"] if "weight" in note["note"] or "denominator" in note["note"]]
    if notes:
        return Row("weights", "note", f"{seen}; {notes[0]['note']}: {notes[0]['message']}", "", numbers)
    if report["opaque"] and flight.weight is not None:
        what = some(list(report["opaque"]))
        return Row("weights", "note", f"{seen}; not held against the loss, which is opaque ({what})", "", numbers)
    if flight.weight is None:
        return Row("weights", "pass", seen, "", numbers)
    verified = report["verdict"] == "verified"
    seen += "; the loss divides by the same" if verified else "; the loss's own denominators are not known"
    return Row("weights", "pass" if verified else "note", seen, "", numbers)


def _update(flight: Flight) -> Row:
    twin, found, same_update, accumulated = flight.twin, flight.found, flight.same_update, flight.accumulated
    if found.refused is not None and not isinstance(found.refused, (WeightError, NonFiniteError)):
        return failed("update", found.refused)
    if found.first is None or not found.gradients:
        return not_judged("update", "no update was applied (see above)" if found.first is None else _outcome(found))
    update = found.first
    numbers: dict[str, Any] = {
        "grad_norm": update.grad_norm,
        "clip_coefficient": update.clip_coefficient,
        "moved": found.moved,
        "apart": found.apart,
        "loss": update.loss,
    }
    seen = f"gradient norm {update.grad_norm:.4g}"
    if update.clip_coefficient != 1.0:
        seen += f", clipped to {twin.max_norm:g}"
    if accumulated and same_update is not None:
        difference = {name: _dense(found.gradients[name]) - g.double() for name, g in accumulated.items()}
        scale = sum(same_update.contribution_norms) / (same_update.big_norm or 1.0) * norm(accumulated)
        off = norm(difference) / max(scale, norm(accumulated)) if norm(accumulated) else norm(difference)
        numbers["engine_gradient_apart"] = off
        limit = max(TOLERANCES[same_update.dtype], same_update.tolerance)
        if off > limit and not any(cause.name == "randomness" for cause in same_update.causes):
            return Row(
                "update",
                "fail",
                f"{seen}; the engine's gradient is {off:.1e} off the sum of the weighed contributions",
                "a loss_fn that gives another loss each time, or hooks on parameters that change gradients",
                numbers,
            )
    if found.stand_in:
        return not_judged("update", f"{seen}; {found.stand_in}")
    seen += f"; {found.kinds} moved the parameters by {found.moved:.3g}"
    assert found.apart is not None
    if found.apart > _tolerance_of(flight.module):
        return Row(
            "update",
            "fail",
            f"{seen}, {found.apart:.1e} of it away from what torch's clip_grad_norm_ and the optimizer do",
            "an optimizer that looks at more than its gradients; please report it",
            numbers,
        )
    if found.moved == 0.0 and any(update.lrs):
        return Row(
            "update",
            "fail",
            f"{seen}: nothing, with a learning rate of {max(update.lrs):g}",
            "gradients that are not zero, and parameters in FP32: an update of 1/256 of a BF16 weight rounds away",
            numbers,
        )
    if found.moved == 0.0:
        seen += " (its learning rate is 0, as where a schedule warms up from 0)"
    return Row("update", "pass", f"{seen}, as torch's clip_grad_norm_ and the optimizer do", "", numbers)


def _finite(flight: Flight) -> Row:
    twin, found, scale = flight.twin, flight.found, flight.scale
    numbers: dict[str, Any] = {"losses": found.losses, "skipped": found.skipped, "loss_scale": scale}
    lost = [k + 1 for k, (loss, w) in enumerate(found.weighed()) if w and not math.isfinite(loss)]
    half = twin.precision.name
    given = nonfinite(flight.group) if lost or found.nonfinite or found.refused is not None else []
    inputs = f"; micro-batch {_listed([k + 1 for k in given])} is given with non-finite values" if given else ""
    cure = (
        "manager.keep_fp32 for the layer at fault (halfstep.compare(model, loss_fn, batch) names it), normalisation "
        'before it, or precision="bf16"'
    )
    if lost:
        return Row(
            "finite", "fail",
            f"the loss of micro-batch {_listed(lost)} is {found.losses[lost[0] - 1]} in {half}{inputs}",
            cure if half == "fp16" else "look at the inputs, and at logarithms, roots and divisions in the loss",
            numbers,
        )  # fmt: skip
    if found.nonfinite or isinstance(found.refused, NonFiniteError):
        seen = f"gradients are not finite in {some(found.nonfinite)} ({len(found.nonfinite)} of {len(flight.names)} "
        seen += "parameters)"
        if twin.scaler.is_enabled():
            how = "at every loss scale down to" if twin.scaler.dynamic else "at the fixed loss scale of"
            seen += f", {how} {scale:g}"
            cure = cure if twin.scaler.dynamic else f"a lower init_scale, or dynamic=True; {cure}"
        if half != "fp16":
            cure = "look at the inputs, and at logarithms, roots and divisions in the loss"
        return Row("finite", "fail", f"{seen}{inputs}", cure, numbers)
    seen = f"losses and gradients in {half}"
    if found.first is None:
        if flight.same_update is None:
            return not_judged("finite", _refused(found))
        return Row("finite", "pass", f"{seen}, of each contribution by itself", "", numbers)
    if not twin.scaler.is_enabled():
        return Row("finite", "pass", seen, "", numbers)
    if found.skipped:
        first = flight.manager.loss_scale
        lowest = min(scale, twin.loss_scale)  # a later group may have needed less
        numbers["init_scale"] = lowest
        return Row(
            "finite", "pass" if found.skipped <= 6 else "note",
            f"{seen}, once the loss scale has come down from {first:g} to {scale:g}: the first {found.skipped} "
            f"updates will be skipped", f"init_scale={lowest:g} skips none of these", numbers,
        )  # fmt: skip
    return Row("finite", "pass", f"{seen}, at a loss scale of {scale:g}", "", numbers)


def _boundaries(flight: Flight) -> Row:
    found = flight.found
    done = found.updates[found.skipped :]
    numbers = {
        "updates": len(done),
        "applied": sum(u.applied for u in done) if found.refused is None else None,
        "A": flight.size,
        "micro_batches": len(flight.batches),
    }
    if found.faults:
        fix = "change parameters in manager.step alone; loss_fn only computes a loss"
        return Row("boundaries", "fail", "; ".join(found.faults), fix, numbers)
    if found.refused is not None or found.first is None or not found.gradients:
        return not_judged("boundaries", _refused(found) if found.refused else _outcome(found))
    sizes = [update.micro_batches for update in done]
    short = f", the last with {sizes[-1]} and a denominator of its own" if sizes[-1] < flight.size else ""
    seen = f"{_count(len(done), 'update')} of {_count(flight.size, 'micro-batch')}{short}; parameters changed at no "
    seen += "other place, counters agree"
    late = [update for update in done[1:] if not update.applied]
    if late:
        seen += f"; {len(late)} later ones were {late[0].outcome}"
    if found.schedule is not None:
        moves, due = found.schedule
        seen += f"; the schedule moved {moves} times, with {flight.manager.scheduler_unit} updates"
        if moves != due:
            return Row("boundaries", "fail", seen, f"it should have moved {due} times", numbers)
    return Row("boundaries", "note" if late else "pass", seen, "", numbers)


def _memory(flight: Flight) -> Row:
    found = flight.found
    parameters = _bytes(flight.module.parameters())
    gradients = _bytes(p for p in flight.module.parameters() if p.requires_grad)
    buffers = _bytes(flight.module.buffers())
    kept = flight.kept
    if kept is None:
        why = "one micro-batch's forward does not fit into memory"
        return Row("memory", "fail", why, "smaller micro-batches, and a larger A for the same effective batch")
    state = found.state_bytes if found.gradients and not found.stand_in else None
    together = parameters + gradients + buffers + (state or 0) + kept
    numbers = {
        "parameters": parameters, "gradients": gradients, "buffers": buffers, "optimizer_state": state,
        "kept_for_backward": kept, "together": together,
    }  # fmt: skip
    shown = "optimizer state not known" if state is None else f"optimizer state {size(state)} from the first update on"
    seen = (
        f"parameters {size(parameters)}, gradients {size(gradients)}, {shown}; one micro-batch keeps {size(kept)} for "
        f"its backward: {size(together)} together, counted, workspaces apart"
    )
    fixed = together - kept
    if kept and fixed > 4 * kept:
        seen += "; parameters and states dominate: smaller micro-batches save little"
    return Row("memory", "pass", seen, "", numbers)


def _islands(flight: Flight) -> Row | None:
    islands = flight.manager._islands
    if not islands:
        return None
    unused = [name for entry in islands for name in entry.unused()]
    names = [name or "the model" for entry in islands for name in entry]
    if unused:
        return Row(
            "islands", "fail", f"kept in FP32, yet their forward never ran: {some(unused)}",
            "match the module whose forward does the work (the attention, not its out_proj)",
        )  # fmt: skip
    return Row("islands", "pass", f"kept in FP32 and run: {some(names)}", "", {"names": names})


def _gradient(found: SameUpdate | None) -> Row:
    if found is None:
        return not_judged("gradient", "nothing to compare")
    parts = len(found.shares)
    dtype = str(found.dtype).removeprefix("torch.")
    numbers = {"error": found.error, "tolerance": found.tolerance, "dtype": dtype, "shares": list(found.shares)}
    numbers["causes"] = [cause.name for cause in found.causes]
    seen = f"accumulated over {_count(parts, 'micro-batch')} it is {found.error:.1e} off the big batch's"
    limit = f" (tolerance {found.tolerance:.0e}, {dtype})"
    if found.same:
        return Row("gradient", "pass", f"{seen}{limit}", "", numbers)
    causes: tuple[Cause, ...] = found.causes
    reasons = "".join(f"\n{cause.name}: {cause.seen}" for cause in causes)
    only_draws = all(cause.name == "randomness" for cause in causes)
    return Row(
        "gradient", "note" if only_draws else "fail", f"{seen}{limit}{reasons}",
        "; ".join(cause.fix for cause in causes), numbers,
    )  # fmt: skip


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).double()


def _refused(found: Rehearsal) -> str:
    return f"the engine refused: {found.refused.seen}" if found.refused is not None else "nothing was run"


def _outcome(found: Rehearsal) -> str:
    return "no update was applied" if found.first is None else f"the first update was {found.first.outcome}"


def _tolerance_of(module: nn.Module) -> float:
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    return max((TOLERANCES.get(dtype, 1e-5) for dtype in dtypes if dtype is not torch.float64), default=1e-5)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def _listed(values: Sequence[Any]) -> str:
    """4, 3, 5; one number where all are the same."""
    if len(set(values)) == 1:
        return str(values[0])
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
