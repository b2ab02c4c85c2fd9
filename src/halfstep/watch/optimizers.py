"""Optimizers: made, and every attempt to change parameters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.events import Attempt, OptimizerMade, StateLoaded
from halfstep.watch.gradients import Gradients
from halfstep.watch.patches import Patches
from halfstep.watch.scalers import Scalers, counts, rate
from halfstep.watch.stream import Draft, Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_PLAIN = (bool, int, float, str, tuple)
_DENSE = 32  # norms of the first so many attempts of an optimizer are measured, then of every _DENSE-th


class Optimizers:
    def __init__(self, session: Session, gradients: Gradients, scalers: Scalers) -> None:
        self._session = session
        self._gradients = gradients
        self._scalers = scalers
        self._running: list[Draft] = []
        self._attempts: Counter[int] = Counter()
        self._handles: list[Any] = []

    def install(self, patches: Patches) -> None:
        patches.around(torch.optim.Optimizer, "__init__", None, self._after_init)
        patches.around(torch.optim.Optimizer, "load_state_dict", None, self._after_load)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _after_init(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer: torch.optim.Optimizer = args[0]
        if self._session.ledger.knows(optimizer):
            return
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        options = optimizer.param_groups[0] if optimizer.param_groups else {}
        self._session.stream.emit(
            OptimizerMade,
            at=self._session.place(),
            optimizer=self._session.ledger.ident(optimizer),
            type=type(optimizer).__name__,
            parameters=len(parameters),
            elements=sum(p.numel() for p in parameters),
            dtypes=dict(Counter(str(p.dtype).removeprefix("torch.") for p in parameters)),
            options={k: v for k, v in options.items() if isinstance(v, _PLAIN) and k != "params"},
        )

    def _after_load(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ident = self._session.ledger.ident(args[0])
        self._session.stream.emit(StateLoaded, at=self._session.place(), kind="optimizer", ident=ident)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._session.patches.live:
            return
        try:
            with self._session.look.silent():
                self._note(optimizer, args, kwargs)
        except Exception as error:
            self._session.fault("before optimizer.step", error)

    def _note(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._scalers.stepping:
            self._gradients.reconcile()
        ident = self._session.ledger.ident(optimizer)
        self._attempts[ident] += 1
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        scale = getattr(optimizer, "grad_scale", None)
        found = getattr(optimizer, "found_inf", None)
        fields: dict[str, Any] = {
            "optimizer": ident,
            "closure": closure is not None,
            "lr": rate(optimizer),
            **counts(optimizer),
        }
        if isinstance(scale, torch.Tensor):
            fields["divided_by"] = Late(scale.clone())
        if isinstance(found, torch.Tensor):
            fields["outcome"] = Late(found.clone(), lambda inf: "skipped" if inf else "applied")
        number = self._attempts[ident]
        if number <= _DENSE or number % _DENSE == 0:
            fields.update(_norms(optimizer))
        draft = self._session.stream.emit(Attempt, at=self._session.place(), **fields)
        self._running.append(draft)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._session.patches.live or not self._running:
            return
        draft = self._running.pop()
        try:
            with self._session.look.silent():
                self._gradients.settle()
            if self._scalers.stepping:
                self._scalers.attempts.append(draft)
        except Exception as error:
            self._session.fault("after optimizer.step", error)
        if not self._scalers.stepping:
            self._session.applied(draft.fields.get("at"))


def _norms(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None and not p.grad.is_sparse]
    if not grads or len({g.device for g in grads}) > 1:
        return {}
    with torch.no_grad():
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
        total = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
    return {"norm": Late(total), "nonfinite": Late(total, lambda n: not abs(n) < float("inf"))}
