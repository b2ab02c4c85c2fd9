"""Random errors as large as rounding's in every gradient: how far apart do these alone bring two runs?"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def jitter(size: float, seed: int) -> None:
    """Before each attempt of an optimizer, give every gradient a random error of ``size`` times its norm.

    Each element gets a normal error relative to itself, drawn from a generator of our own: the script's numbers stay
    what they are. Gradients that a closure computes inside the attempt are not reached.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is None or gradient.is_sparse:
                        continue
                    if gradient.device not in generators:
                        generators[gradient.device] = torch.Generator(gradient.device).manual_seed(seed)
                    drawn = torch.empty_like(gradient).normal_(generator=generators[gradient.device])
                    gradient.addcmul_(gradient, drawn, value=size)

    register_optimizer_step_pre_hook(before)
