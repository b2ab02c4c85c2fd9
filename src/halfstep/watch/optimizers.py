"""Optimizers: made, and every attempt to change parameters."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.events import Attempt, HalfUpdate, OptimizerMade, Place, StateLoaded
from halfstep.watch.gradients import Gradients
from halfstep.watch.halves import Halves
from halfstep.watch.patches import Patches, uncompiled
from halfstep.watch.perthread import PerThread
from halfstep.watch.place import made_at
from halfstep.watch.scalers import Scalers, counts, rate
from halfstep.watch.stream import Draft, Late, norms_of

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_PLAIN = (bool, int, float, str, tuple)
_DENSE = 32  # norms of the first so many attempts of an optimizer are measured, then of every _DENSE-th


class Optimizers:
    def __init__(self, session: Session, gradients: Gradients, scalers: Scalers, halves: Halves) -> None:
        self._session = session
        self._gradients = gradients
        self._scalers = scalers
        self._halves = halves
        self._patches: Patches | None = None
        self._two_step: set[type] = set()
        self._attempts: Counter[int] = Counter()
        self._looked = False
        self._handles: list[Any] = []

    _running: PerThread[list[tuple[dict[str, Any], Draft | None]]] = PerThread(list)  # fields, event if told by now

    def install(self, patches: Patches) -> None:
        self._patches = patches
        self._two_step.clear()
        patches.around(torch.optim.Optimizer, "__init__", None, self._after_init)
        patches.around(torch.optim.Optimizer, "load_state_dict", None, self._after_load)
        patches.around(torch.autograd, "backward", self._find)
        self._looked = False
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Optimizers made before anybody watched (in a notebook, around a call): looked for once, before a backward."""
        if self._looked:
            return
        self._looked = True
        kinds = _kinds(torch.optim.Optimizer)
        for optimizer in [thing for thing in gc.get_objects() if type(thing) in kinds]:
            if "_optimizer_step_pre_hooks" in vars(optimizer):  # a wrapper that only looks like one has none
                self._made(optimizer, None)

    def _after_init(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made(args[0], made_at(args[0]))

    def _made(self, optimizer: torch.optim.Optimizer, at: Place | None) -> None:
        if self._session.ledger.knows(optimizer):
            return
        self._watch_halves(type(optimizer))
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        options = optimizer.param_groups[0] if optimizer.param_groups else {}
        self._session.stream.emit(
            OptimizerMade,
            at=at,
            optimizer=self._session.ledger.ident(optimizer),
            type=type(optimizer).__name__,
            parameters=len(parameters),
            elements=sum(p.numel() for p in parameters),
            dtypes=dict(Counter(str(p.dtype).removeprefix("torch.") for p in parameters)),
            options={k: v for k, v in options.items() if isinstance(v, _PLAIN) and k != "params"},
        )

    def _watch_halves(self, kind: type) -> None:
        """Two-step optimizers (SAM and its kin) move parameters in methods of their own."""
        if kind in self._two_step or self._patches is None:
            return
        self._two_step.add(kind)
        for name in ("first_step", "second_step", "ascent_step", "descent_step"):
            if callable(getattr(kind, name, None)):
                self._patches.around(kind, name, self._before_half(name))

    def _before_half(self, method: str) -> Any:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._gradients.reconcile()
            ident = self._session.ledger.ident(args[0])
            self._session.stream.emit(HalfUpdate, at=self._session.place(), optimizer=ident, method=method)

        return before

    def _after_load(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ident = self._session.ledger.ident(args[0])
        self._session.stream.emit(
            StateLoaded, at=self._session.place(), kind="optimizer", ident=ident, states=len(args[0].state)
        )

    @uncompiled
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._session.patches.live:
            return
        self._gradients.busy += 1
        try:
            with self._session.patches.lock, self._session.look.silent():
                self._note(optimizer, args, kwargs)
        except Exception as error:
            self._session.fault("before optimizer.step", error)

    def _note(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._scalers.stepping:
            self._gradients.reconcile()
            self._halves.about_to_update(optimizer)
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
        fields["at"] = self._session.place()
        if closure is not None:
            self._running.append((fields, None))  # its contributions come while it runs: it is told after them
            self._gradients.closures += 1
            self._gradients.busy -= 1
            return
        if number <= _DENSE or number % _DENSE == 0:
            fields.update(_norms(optimizer))
        self._running.append((fields, self._session.stream.emit(Attempt, **fields)))

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._session.patches.live or not self._running:
            return
        fields, draft = self._running.pop()
        if draft is None:
            self._gradients.closures -= 1
        else:
            self._gradients.busy = max(0, self._gradients.busy - 1)
        try:
            with self._session.patches.lock, self._session.look.silent():
                self._gradients.settle()
                if draft is None:
                    draft = self._session.stream.emit(Attempt, **{**fields, **counts(optimizer)})
                number = self._attempts[fields["optimizer"]]
                if number <= _DENSE or number % _DENSE == 0:
                    draft.fields.update(_weights(optimizer))
                self._gradients.attempted(optimizer)
            if self._scalers.stepping:
                self._scalers.attempts.append(draft)
        except Exception as error:
            self._session.fault("after optimizer.step", error)
        if not self._scalers.stepping:
            self._session.applied(fields.get("at"))


def _norms(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None and not p.grad.is_sparse]
    total = _norm(grads)
    if total is None:
        return {}
    return {"norm": Late(total), "nonfinite": Late(total, lambda n: not abs(n) < float("inf"))}


def _weights(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    total = _norm([p.detach() for g in optimizer.param_groups for p in g["params"] if not p.is_sparse])
    return {} if total is None else {"weights": Late(total)}


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    if not tensors or len({t.device for t in tensors}) > 1:
        return None
    with torch.no_grad():
        total: torch.Tensor = torch.linalg.vector_norm(norms_of(tensors))
    return total


def _kinds(base: type[Any]) -> set[type[Any]]:
    return {base, *(kind for sub in base.__subclasses__() for kind in _kinds(sub))}
