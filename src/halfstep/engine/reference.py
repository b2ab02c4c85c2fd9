"""The slow, obviously right twin of the engine: one update in plain loops.

Nothing here is fast, folded or in half precision. Every rule is written as its definition reads, over plain tensors
(FP64 in the tests), so that the engine can be held against it. It knows no autocast, no devices and no replicas.

Origin of the formulas: the objective and its denominators are law 1 of the design (Σ S / W, one W a term); clipping
is ``torch.nn.utils.clip_grad_norm_``; the loss scale is ``torch.amp.GradScaler``; the optimizers are ``torch.optim``'s
SGD, Adam (Kingma and Ba 2015, amsgrad of Reddi et al. 2018) and AdamW (Loshchilov and Hutter 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Term:
    """One term of one micro-batch's loss: its supervised elements' losses (0-dim each), and what they weigh together.

    ``weight`` is their number unless elements weigh something else.
    """

    losses: Sequence[Tensor]
    weight: float


MicroBatch = Callable[[], Sequence[Term]]  # runs the forward and returns its terms; every micro-batch the same terms


@dataclass(frozen=True)
class GroupGradient:
    """The gradient of Σ_terms S / W over a group, and what it was made of."""

    gradients: Gradients  # None where no element reaches the parameter
    loss: float  # Σ_terms S / W
    weights: tuple[float, ...]  # W of each term
    contribution_norms: tuple[float, ...]  # ‖what each micro-batch adds‖; law 7's errors are relative to their sum


def group_gradient(parameters: Sequence[Tensor], micro_batches: Sequence[MicroBatch]) -> GroupGradient:
    """The group's gradient: every element's own gradient, summed, and each term's sum divided by its W at the end.

    Elements of a micro-batch of weight 0 are not looked at: whatever their losses, they contribute nothing.
    """
    sums: list[list[list[Tensor | None]]] = []  # [micro-batch][term][parameter]: gradient of the summed losses
    losses: list[list[float]] = []
    weights: list[list[float]] = []
    for micro_batch in micro_batches:
        terms = list(micro_batch())
        sums.append([[None for _ in parameters] for _ in terms])
        losses.append([0.0 for _ in terms])
        weights.append([term.weight for term in terms])
        for t, term in enumerate(terms):
            if term.weight == 0:
                continue
            for loss in term.losses:
                losses[-1][t] += float(loss.detach())
                of_element = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
                for p, gradient in enumerate(of_element):
                    sums[-1][t][p] = _add(sums[-1][t][p], gradient)

    total = [sum(column) for column in zip(*weights, strict=True)]
    gradients: Gradients = [None for _ in parameters]
    norms: list[float] = []
    loss_value = 0.0
    for k, of_micro_batch in enumerate(sums):
        contribution: Gradients = [None for _ in parameters]
        for t, of_term in enumerate(of_micro_batch):
            if total[t] == 0:
                continue
            loss_value += losses[k][t] / total[t]
            for p, summed in enumerate(of_term):
                if summed is not None:
                    contribution[p] = _add(contribution[p], summed / total[t])
        norms.append(norm(contribution))
        for p, added in enumerate(contribution):
            gradients[p] = _add(gradients[p], added)
    return GroupGradient(gradients, loss_value, tuple(total), tuple(norms))


def norm(gradients: Sequence[Tensor | None]) -> float:
    """The 2-norm over all elements of all gradients."""
    square = 0.0
    for gradient in gradients:
        if gradient is not None:
            square += float((gradient.double() ** 2).sum())
    return math.sqrt(square) if not math.isnan(square) else math.nan


def clip_coefficient(total_norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied by: min(1, max_norm / (norm + 1e-6)); NaN for a NaN norm."""
    if max_norm is None:
        return 1.0
    coefficient = max_norm / (total_norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def is_finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


@dataclass
class LossScale:
    """The loss scale and its moves: halved on overflow, doubled after ``growth_interval`` finite attempts in a row."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 0.0
    dynamic: bool = True
    growth_tracker: int = 0

    def move(self, overflow: bool) -> None:
        """Move once, after an attempt (never for an empty update: nothing was attempted under the scale)."""
        if not self.dynamic:
            return
        if overflow:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = self.scale * self.growth_factor
            if grown <= torch.finfo(torch.float32).max:
                self.scale = grown
            self.growth_tracker = 0


class Optimizer(Protocol):
    """What :class:`Reference` asks of an optimizer."""

    parameters: Sequence[Tensor]
    lr: float

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Change ``parameters`` in place; a parameter whose gradient is None is left alone, its state too."""


@dataclass
class SGD:
    parameters: Sequence[Tensor]
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    buffers: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None]) -> None:
        for p, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is None:
                continue
            direction = gradient + self.weight_decay * parameter
            if self.momentum != 0:
                if p not in self.buffers:
                    self.buffers[p] = direction.clone()  # the first one undamped, as torch does
                else:
                    self.buffers[p] = self.momentum * self.buffers[p] + (1 - self.dampening) * direction
                direction = direction + self.momentum * self.buffers[p] if self.nesterov else self.buffers[p]
            parameter -= self.lr * direction


@dataclass
class Adam:
    parameters: Sequence[Tensor]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    decoupled: bool = False  # AdamW: decay the parameter, not the gradient
    updates: dict[int, int] = field(default_factory=dict)
    first: dict[int, Tensor] = field(default_factory=dict)
    second: dict[int, Tensor] = field(default_factory=dict)
    largest: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None]) -> None:
        beta1, beta2 = self.betas
        for p, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is None:
                continue
            if self.decoupled:
                parameter *= 1 - self.lr * self.weight_decay
            else:
                gradient = gradient + self.weight_decay * parameter
            zero = torch.zeros_like(parameter)
            count = self.updates[p] = self.updates.get(p, 0) + 1
            first = self.first[p] = beta1 * self.first.get(p, zero) + (1 - beta1) * gradient
            second = self.second[p] = beta2 * self.second.get(p, zero) + (1 - beta2) * gradient**2
            if self.amsgrad:
                second = self.largest[p] = torch.maximum(self.largest.get(p, zero), second)
            unbiased_first = first / (1 - beta1**count)
            unbiased_second = second / (1 - beta2**count)
            parameter -= self.lr * unbiased_first / (unbiased_second.sqrt() + self.eps)


@dataclass
class AdamW(Adam):
    weight_decay: float = 0.01
    decoupled: bool = True


@dataclass
class Schedule:
    """The learning rate as a factor of its first value, after ``count`` updates of its unit."""

    factor: Callable[[int], float]
    unit: Literal["applied", "attempted"] = "applied"
    count: int = 0


@dataclass(frozen=True)
class ReferenceUpdate:
    """What one update did. ``gradients`` are the group's, unscaled and before clipping."""

    outcome: Literal["applied", "skipped", "empty"]
    loss: float
    weight: float  # W of the first term
    scale: float
    grad_norm: float
    clip_coefficient: float
    lr: float  # of the first optimizer, as this update used it
    gradients: Gradients
    contribution_norms: tuple[float, ...]


class Reference:
    """The engine's update in loops: objective, scale, clip, skip, optimizers, schedule, counters.

    ``optimizers`` share one group and one norm (parameter groups are optimizers of their own here). ``scale`` None is
    no loss scaling (scale 1); ``on_nonfinite`` then says what a non-finite gradient does; under a loss scale the
    update is skipped and the scale moves. ``max_norm`` None does not clip.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        scale: LossScale | None = None,
        max_norm: float | None = 2.0,
        schedule: Schedule | None = None,
        on_nonfinite: Literal["skip", "ignore"] = "skip",
    ) -> None:
        self.optimizers = list(optimizers)
        self.scale = scale
        self.max_norm = max_norm
        self.schedule = schedule
        self.on_nonfinite = on_nonfinite
        self.attempted_updates = 0
        self.applied_updates = 0
        self.weight_seen = 0.0
        self._first_lr = [optimizer.lr for optimizer in self.optimizers]
        self._set_lr()

    def update(self, micro_batches: Sequence[MicroBatch]) -> ReferenceUpdate:
        """Attempt one update on a group of micro-batches."""
        parameters = [parameter for optimizer in self.optimizers for parameter in optimizer.parameters]
        group = group_gradient(parameters, micro_batches)
        scale = 1.0 if self.scale is None else self.scale.scale
        lr = self.optimizers[0].lr
        empty = all(weight == 0 for weight in group.weights)
        scaled: Gradients = [None if gradient is None else gradient * scale for gradient in group.gradients]
        overflow = not is_finite(scaled)
        unscaled: Gradients = [None if gradient is None else gradient / scale for gradient in scaled]
        grad_norm = norm(unscaled)
        coefficient = clip_coefficient(grad_norm, self.max_norm)

        outcome: Literal["applied", "skipped", "empty"]
        if empty:
            outcome = "empty"
        elif overflow and (self.scale is not None or self.on_nonfinite == "skip"):
            outcome = "skipped"
        else:
            outcome = "applied"
            start = 0
            for optimizer in self.optimizers:
                own = unscaled[start : start + len(optimizer.parameters)]
                optimizer.update([None if gradient is None else gradient * coefficient for gradient in own])
                start += len(optimizer.parameters)
        if self.scale is not None and outcome != "empty":
            self.scale.move(overflow)
        self.attempted_updates += 1
        self.applied_updates += outcome == "applied"
        self.weight_seen += group.weights[0]
        if self.schedule is not None and (outcome == "applied" or self.schedule.unit == "attempted"):
            self.schedule.count += 1
            self._set_lr()
        return ReferenceUpdate(
            outcome, group.loss, group.weights[0], scale, grad_norm, coefficient, lr, unscaled, group.contribution_norms
        )

    def _set_lr(self) -> None:
        if self.schedule is not None:
            for optimizer, first in zip(self.optimizers, self._first_lr, strict=True):
                optimizer.lr = first * self.schedule.factor(self.schedule.count)
