"""A lower learning rate for one layer: some FP32 updates each way, on copies of the model and its optimizer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import UnsupportedError
from halfstep.probe.micro_batch.modules import Full
from halfstep.probe.micro_batch.passes import Passes, unwatched


@dataclass(frozen=True)
class Rates:
    """Largest magnitudes among the FP32 outputs of the layer: now, and after updates at either rate."""

    name: str
    now: float
    present: float
    lowered: float
    at_present: Passes
    """Of the copy that was trained at the present rate."""
    at_lowered: Passes


def lower_rate(passes: Passes, optimizer: torch.optim.Optimizer, name: str | None, updates: int, rate: float) -> Rates:
    """Train two copies with this micro-batch, the second with ``rate`` times the learning rate in module ``name``.

    None is the first module with parameters of its own whose outputs grow as those of the fastest do, or half as much.
    """
    before, present, as_it_is = _trained(passes, optimizer, "", updates, 1.0)
    if name is None:
        owners = [n for n, m in as_it_is.model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        growth = {n: present[n] / before[n] for n in before if n in owners and before[n] > 0}
        name = next((n for n, g in growth.items() if 2 * g >= max(growth.values())), "")
    _, lowered, after = _trained(passes, optimizer, name, updates, rate)
    return Rates(name, before[name], present[name], lowered[name], as_it_is, after)


def _trained(
    passes: Passes, optimizer: torch.optim.Optimizer, name: str, updates: int, rate: float
) -> tuple[dict[str, float], dict[str, float], Passes]:
    try:
        with unwatched():
            model, twin = copy.deepcopy((passes.model, optimizer))  # together: the twin's parameters are the copy's
    except Exception as error:  # whatever a user's model or optimizer does when it is copied
        words = f"model and optimizer cannot be copied ({type(error).__name__}: {str(error)[:60]})"
        raise UnsupportedError(words, "make both deep-copyable, or try the rate in a run") from error
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS runs the loss itself, several times an update", "try the rate in a run")
    own = Passes(model, passes.loss_fn, passes.batch)
    layer = {id(p) for p in model.get_submodule(name).parameters()}
    twin.param_groups[:] = [part for group in twin.param_groups for part in _split(group, layer, rate)]
    parameters = dict(model.named_parameters())
    for update in range(updates + 1):
        seen = Full()
        gradients = own.full(seen).gradients
        peaks: dict[str, float] = {}
        for key, tensor in seen.outputs.items():
            peaks[key[0]] = max(peaks.get(key[0], 0.0), float(tensor.abs().max()))
        if update == 0:
            first = peaks
        if update == updates:
            break
        with unwatched():
            for which, parameter in parameters.items():
                gradient = gradients.get(which)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            twin.step()
    for parameter in parameters.values():
        parameter.grad = None
    return first, peaks, own


def _split(group: dict[str, Any], layer: set[int], rate: float) -> list[dict[str, Any]]:
    """The group without the layer's parameters, and a group of those."""
    inside = [p for p in group["params"] if id(p) in layer]
    outside = [p for p in group["params"] if id(p) not in layer]
    return [
        {**group, "params": part, "lr": group["lr"] * factor}
        for part, factor in ((outside, 1.0), (inside, rate))
        if part
    ]
