"""The engine's own updates over a few micro-batches, on the model itself, with copies of its optimizers.

Runs inside :func:`halfstep.probe.trial.unchanged`, which puts the model back; the copies are thrown away.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.group import Group
from halfstep.engine.manager import MixedPrecisionManager
from halfstep.engine.update import Update
from halfstep.errors import HalfstepError
from halfstep.probe.trial import RandomState

_TRIES = 160  # halvings from the largest scale FP32 holds to the smallest that is of any use

Loss = Callable[[Any], Tensor]


@dataclass
class Rehearsal:
    """What was seen of the first group, and of those after it."""

    size: int
    """A, of a full group."""
    skipped: int = 0
    """Attempts before the first that was applied: the loss scale looked for its place."""
    first: Update | None = None
    """The attempt the first group ended with."""
    updates: list[Update] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of the first group's micro-batches, as ``loss_fn`` returned them."""
    weights: list[float] | None = None
    """Of the first group's micro-batches; None: contributions came without weights."""
    source: str = ""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """The first group's, unscaled and normalised by the engine, before clipping."""
    nonfinite: list[str] = field(default_factory=list)
    """Parameters whose gradient was not finite in the last attempt with the first group."""
    zero: list[str] = field(default_factory=list)
    """Parameters without any gradient but zero in the first group."""
    dead: list[str] = field(default_factory=list)
    """Those of them that have none after the first update either."""
    refused: HalfstepError | None = None
    """What the engine said no to; what comes after it was not run."""
    apart: float | None = None
    """‖engine's parameters − torch's‖ after the first update, relative to how far that moved them (and to rounding)."""
    moved: float = 0.0
    """‖parameters after − before‖, of the first update."""
    faults: list[str] = field(default_factory=list)
    """What the order of things should not have been, as words."""
    seen: list[Any] = field(default_factory=list)
    """The micro-batches that ``loss_fn`` was given by the groups, in order."""
    state_bytes: int = 0
    schedule: tuple[int, int] | None = None
    """(moves of the schedule, moves it should have made); None: no schedule."""
    stand_in: str = ""
    """Why not the optimizers themselves were copied; a plain one stood in."""
    kinds: str = ""

    def weighed(self) -> list[tuple[float, float]]:
        """(loss, weight) of the first group's micro-batches."""
        return list(zip(self.losses, self.weights or [1.0] * len(self.losses), strict=True))


class Rehearsing:
    """Makes a :class:`Rehearsal`. ``loss`` computes a micro-batch's loss, autocast included."""

    def __init__(
        self,
        twin: MixedPrecisionManager,
        model: Any,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scheduler: Any,
        loss: Loss,
        batches: Sequence[Any],
        size: int,
        settings: dict[str, Any],
        names: dict[int, str],
    ) -> None:
        self.twin = twin
        self.model = model
        self.module = module
        self.loss = loss
        self.batches = list(batches)
        self.size = size
        self.settings = settings
        self.names = names
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.found = Rehearsal(size)
        self.optimizers, self.scheduler = self._copies(optimizers, scheduler)
        self.plain, _ = self._copies(optimizers, None)
        self.found.kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)

    def run(self) -> Rehearsal:
        found = self.found
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a copied scheduler does not know that its optimizer has stepped
                self._run()
        except HalfstepError as error:
            found.refused = error
        finally:
            self.twin.discard()
            self.twin._order.witnesses.keep([], frozenset(), [])  # no hook stays on the parameters
        return found

    def _run(self) -> None:
        found, twin = self.found, self.twin
        start = RandomState()
        before = [p.detach().clone() for p in self.parameters]
        position = _position(self.scheduler)
        while True:
            start.restore()
            found.seen.clear()
            groups = twin.groups(self.batches, self.size, **self.settings)
            group = next(iter(groups))
            found.losses = self._contribute(group, before)
            self._keep_weights()
            raw = {p: None if p.grad is None else p.grad.detach().clone() for p in self.parameters}
            mode, reference = self._normalised()
            update = found.first = twin.step(self.model, self.optimizers, self.scheduler)
            found.updates.append(update)
            found.nonfinite = [
                self.names[id(p)] for p, g in raw.items() if g is not None and not bool(_values(g).isfinite().all())
            ]
            if not update.skipped:
                break
            if any(not torch.equal(p, old) for p, old in zip(self.parameters, before, strict=True)):
                found.faults.append("a skipped update changed parameters")
            lost = any(not math.isfinite(loss) for loss, w in found.weighed() if w != 0.0)
            if lost or not twin.scaler.is_enabled() or not twin.scaler.dynamic or found.skipped + 1 >= _TRIES:
                return
            found.skipped += 1
        if update.empty:
            return
        absent = {id(p) for p, g in raw.items() if g is None}
        found.zero = [self.names[id(p)] for p, g in raw.items() if g is None or not bool(_values(g).any())]
        scale = update.scale * (update.weight / reference if mode == "along" and update.weight else 1.0)
        found.gradients = {self.names[id(p)]: _divided(p, g, scale) for p, g in raw.items()}
        del raw
        found.state_bytes = sum(_bytes_of_state(optimizer) for optimizer in self.optimizers)
        self._hold_against_torch(before, absent)
        for group in groups:
            self._contribute(group, None)
            found.updates.append(twin.step(self.model, self.optimizers, self.scheduler))
        self._count()
        if self.scheduler is not None:
            unit = twin.scheduler_unit
            due = {"applied": sum(u.applied for u in found.updates), "attempted": len(found.updates), "calls": 0}[unit]
            found.schedule = (_position(self.scheduler) - position, due)
        if found.zero and any(not torch.equal(p, old) for p, old in zip(self.parameters, before, strict=True)):
            self._look_again(start)

    def _contribute(self, group: Group[Any], before: list[Tensor] | None) -> list[float]:
        """Every micro-batch's backward. ``before``: the parameters, which must not change meanwhile."""
        losses = []
        for batch in group:
            self.found.seen.append(batch)
            loss = self.loss(batch)
            self.twin.backward(loss)
            losses.append(float(loss.detach()))
            changed = before is not None and any(
                not torch.equal(p, old) for p, old in zip(self.parameters, before, strict=True)
            )
            if changed:
                name = f"micro-batch {len(losses)}"
                self.found.faults.append(f"parameters changed inside a group: loss_fn changed them in {name}")
                before = None
        return losses

    def _keep_weights(self) -> None:
        pending = self.twin._ledger.pending
        self.found.source = pending[0].source
        known = [c.weights for c in pending]
        self.found.weights = None if None in known else [float(w[0]) for w in known if w is not None]

    def _normalised(self) -> tuple[str, float]:
        """(mode, ref) of what is pending: see :class:`halfstep.engine.ledger.Ledger`."""
        ledger = self.twin._ledger
        return ledger.pending[0].mode, float(ledger.reference)

    @torch.no_grad()
    def _hold_against_torch(self, before: list[Tensor], absent: set[int]) -> None:
        """What plain torch does from the same state with the same gradient: clip_grad_norm_, then the optimizer."""
        found, twin = self.found, self.twin
        if found.stand_in:
            return
        after = [p.detach().clone() for p in self.parameters]
        reached = [p.grad for p in self.parameters]
        for parameter, old in zip(self.parameters, before, strict=True):
            parameter.copy_(old)
            key = id(parameter)
            parameter.grad = None if key in absent else found.gradients[self.names[key]].clone()
        had = [p for p in self.parameters if p.grad is not None]
        try:
            if twin.max_norm is not None and had:
                _clip(had, twin.max_norm)
            for optimizer in self.plain:
                optimizer.step()
        except Exception as error:  # whatever an optimizer or sparse gradients raise
            found.stand_in = f"plain torch could not follow: {str(error).splitlines()[0][:200]}"
        else:
            moved = apart = size = 0.0
            for parameter, new, old in zip(self.parameters, after, before, strict=True):
                moved += _square(new, old)
                apart += _square(new, parameter)
                size += (
                    float(torch.finfo(old.dtype).eps ** 2 * (old.double() ** 2).sum())
                    if old.is_floating_point()
                    else 0.0
                )
            found.moved = math.sqrt(moved)
            slack = math.sqrt(size)  # both roundings of the parameters themselves
            found.apart = max(0.0, math.sqrt(apart) - slack) / found.moved if moved else math.sqrt(apart)
        for parameter, new, gradient in zip(self.parameters, after, reached, strict=True):
            parameter.copy_(new)
            parameter.grad = gradient

    def _count(self) -> None:
        """Hold the manager's counters against what was done."""
        found, updates = self.found, self.found.updates
        total = self.twin.report()["counters"]
        full, rest = divmod(len(self.batches), self.size)
        sizes = [self.size] * full + [rest] * (rest > 0)
        told = [update.micro_batches for update in updates[found.skipped :]]
        if told != sizes:
            found.faults.append(f"{len(self.batches)} micro-batches in groups of {self.size} made updates of {told}")
        expected = {
            "attempted": len(updates),
            "applied": sum(u.applied for u in updates),
            "skipped": sum(u.skipped for u in updates),
            "empty": sum(u.empty for u in updates),
            "micro_batches": sum(sizes) + found.skipped * sizes[0],
        }
        wrong = [f"{name} {total[name]} (done: {count})" for name, count in expected.items() if total[name] != count]
        if wrong:
            found.faults.append(f"the manager counted {', '.join(wrong)}")
        if self.twin.pending:
            found.faults.append(f"{self.twin.pending} contributions were left pending")
        if [id(batch) for batch in found.seen] != [id(batch) for batch in self.batches]:
            found.faults.append("the groups did not give every micro-batch once, in order")

    def _look_again(self, start: RandomState) -> None:
        """The first group's gradients once more, after the update: what started from zero may have come alive."""
        start.restore()
        seen = list(self.found.seen)
        group = next(iter(self.twin.groups(self.batches, self.size, **self.settings)))
        self._contribute(group, None)
        self.found.seen = seen
        self.found.dead = [
            self.names[id(p)]
            for p in self.parameters
            if self.names[id(p)] in self.found.zero and (p.grad is None or not bool(_values(p.grad).any()))
        ]

    def _copies(
        self, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any
    ) -> tuple[list[torch.optim.Optimizer], Any]:
        """The optimizers (and scheduler) with states of their own, on the very same parameters."""
        memo: dict[int, Any] = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        try:
            copies, moved = copy.deepcopy((list(optimizers), scheduler), memo)
            for made, original in zip(copies, optimizers, strict=True):
                if len(made.param_groups) != len(original.param_groups):
                    raise TypeError(f"a copy of {type(original).__name__} has other parameter groups")
        except Exception as error:  # whatever a user's optimizer raises when it is copied
            self.found.stand_in = f"the optimizer could not be copied: {error}"
            return [torch.optim.SGD(self.parameters, lr=1e-4)], None
        return copies, moved


def _clip(parameters: Sequence[Tensor], limit: float) -> None:
    """``clip_grad_norm_``, which knows no sparse gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    norm = torch.stack([_values(gradient).norm() for gradient in gradients]).norm()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * (limit / (norm + 1e-6)).clamp(max=1.0)


def _divided(parameter: Tensor, gradient: Tensor | None, scale: float) -> Tensor:
    """``gradient``, which nobody else holds, over ``scale``; zeros for None."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient / scale if gradient.is_sparse else gradient.div_(scale)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _square(one: Tensor, other: Tensor) -> float:
    return float(((one.detach().double() - other.detach().double()) ** 2).sum())


def _bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    tensors = {
        id(value): value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _position(scheduler: Any) -> int:
    first = next(iter(scheduler), None) if isinstance(scheduler, (list, tuple)) else scheduler
    return int(getattr(first, "last_epoch", 0))
