"""Loss scalers: their life, what they scaled, unscaled, stepped and updated.

A scaled loss is marked on its own graph node, so the backward that starts from it (or from a sum or quotient of it)
knows which scale it carries without a look at any value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from halfstep.events import Attempt, ScalerMade, ScaleUpdated, StateLoaded, Unscaled
from halfstep.watch.gradients import Gradients
from halfstep.watch.patches import Patches
from halfstep.watch.stream import Draft, Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

Scaler = torch.amp.GradScaler
_MARK = "halfstep.scale"
_REACH = 24  # graph nodes looked through for the mark below a backward's root


class Mark:
    """The scale that a loss carries; ``scale`` is a copy that later updates do not move."""

    __slots__ = ("scale", "scaler")

    def __init__(self, scaler: int, scale: torch.Tensor) -> None:
        self.scaler = scaler
        self.scale = scale


class Scalers:
    def __init__(self, session: Session, gradients: Gradients) -> None:
        self._session = session
        self._gradients = gradients
        self._scales: dict[int, torch.Tensor] = {}
        self._depth = 0
        self.attempts: list[Draft] = []  # attempts made inside the scaler.step that is running

    @property
    def stepping(self) -> bool:
        """Whether `scaler.step` is on the stack: an optimizer's update inside it is the scaler's."""
        return self._depth > 0

    def install(self, patches: Patches) -> None:
        patches.around(Scaler, "__init__", None, self._after_init)
        for kind in {Scaler, *_overriding(Scaler)}:
            own = vars(kind)
            if "scale" in own:
                patches.around(kind, "scale", None, self._after_scale)
            if "unscale_" in own:
                patches.around(kind, "unscale_", self._before_unscale, self._after_unscale)
            if "step" in own:
                patches.around(kind, "step", self._before_step, self._after_step, self._failed_step)
            if "update" in own:
                patches.around(kind, "update", self._before_update, self._after_update)
            if "load_state_dict" in own:
                patches.around(kind, "load_state_dict", None, self._after_load)

    def mark_of(self, roots: list[torch.Tensor]) -> Mark | None:
        """The scale carried by these roots, looked for in the first nodes of their graphs."""
        queue = [r.grad_fn for r in roots if r.grad_fn is not None]
        for node in queue:
            mark = _metadata(node).get(_MARK)
            if isinstance(mark, Mark):
                return mark
            if len(queue) < _REACH:
                queue.extend(n for n, _ in node.next_functions if n is not None)
        return None

    # -- life ----------------------------------------------------------------------------------------------------

    def _after_init(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler: Scaler = args[0]
        self._session.stream.emit(
            ScalerMade,
            at=self._session.place(),
            scaler=self._session.ident("scaler", scaler),
            scale=float(scaler._init_scale) if scaler._enabled else 1.0,
            enabled=scaler._enabled,
            device=getattr(scaler, "_device", ""),
            growth_factor=float(getattr(scaler, "_growth_factor", 1.0)),
            backoff_factor=float(getattr(scaler, "_backoff_factor", 1.0)),
            growth_interval=int(getattr(scaler, "_growth_interval", 0)),
        )

    def _after_load(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ident = self._session.ident("scaler", args[0])
        self._scales.pop(ident, None)
        self._session.stream.emit(StateLoaded, at=self._session.place(), kind="scaler", ident=ident)

    def _scale_now(self, scaler: Scaler) -> torch.Tensor | None:
        ident = self._session.ident("scaler", scaler)
        known = self._scales.get(ident)
        scale = getattr(scaler, "_scale", None)  # a disabled scaler has none
        if known is None and isinstance(scale, torch.Tensor):
            known = self._scales[ident] = scale.detach().clone()
        return known

    # -- verbs ---------------------------------------------------------------------------------------------------

    def _after_scale(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler: Scaler = args[0]
        scale = self._scale_now(scaler)
        if scale is None or not scaler._enabled:
            return
        mark = Mark(self._session.ident("scaler", scaler), scale)
        for tensor in _flat(result):
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[_MARK] = mark

    def _before_unscale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._gradients.reconcile()

    def _after_unscale(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler, optimizer = args[0], kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        if not scaler._enabled or optimizer is None:
            return
        self._gradients.settle()
        scale = self._scale_now(scaler)
        found = _found_inf(scaler, optimizer)
        self._session.stream.emit(
            Unscaled,
            at=self._session.place(),
            scaler=self._session.ident("scaler", scaler),
            optimizer=self._session.ledger.ident(optimizer),
            scale=None if scale is None else Late(scale),
            found_inf=None if found is None else Late(found, bool),
            in_step=self.stepping,
        )

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        enabled = bool(args[0]._enabled)
        if enabled:
            self._depth += 1
            self._gradients.reconcile()
            self.attempts.clear()
        return enabled

    def _failed_step(self, enabled: Any, error: BaseException) -> None:
        self._depth -= bool(enabled)

    def _after_step(self, enabled: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not enabled:
            return
        self._depth -= 1
        scaler, optimizer = args[0], kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        if optimizer is None or self._depth:
            return
        found = _found_inf(scaler, optimizer)
        ident = self._session.ident("scaler", scaler)
        if self.attempts:
            draft = self.attempts[-1]
            draft.fields.update(via="scaler", scaler=ident, at=self._session.place())
            if found is not None:
                draft.fields["outcome"] = Late(found, lambda inf: "skipped" if inf else "applied")
        else:
            draft = self._session.stream.emit(
                Attempt,
                at=self._session.place(),
                optimizer=self._session.ledger.ident(optimizer),
                via="scaler",
                scaler=ident,
                outcome="skipped",
                lr=rate(optimizer),
                **counts(optimizer),
            )
        self._gradients.settle()
        self._session.applied(draft.fields.get("at"))

    def _before_update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        return self._scale_now(args[0]) if args[0]._enabled else None

    def _after_update(self, before: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler: Scaler = args[0]
        if not scaler._enabled:
            return
        ident = self._session.ident("scaler", scaler)
        self._scales.pop(ident, None)
        after = self._scale_now(scaler)
        given = kwargs.get("new_scale", args[1] if len(args) > 1 else None)
        self._session.stream.emit(
            ScaleUpdated,
            at=self._session.place(),
            scaler=ident,
            before=None if before is None else Late(before),
            after=None if after is None else Late(after),
            given=given is not None,
        )


def counts(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    return {"parameters": len(parameters), "gradients": sum(p.grad is not None for p in parameters)}


def rate(optimizer: torch.optim.Optimizer) -> Any:
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(rate, torch.Tensor):
        return Late(rate.clone())
    return None if rate is None else float(rate)


def _found_inf(scaler: Scaler, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    found = scaler._per_optimizer_states[id(optimizer)].get("found_inf_per_device") or {}
    values = list(found.values())
    if not values:
        return None
    return values[0].clone() if len(values) == 1 else torch.stack([v.to(values[0].device) for v in values]).sum()


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flat(v)]
    return []


def _metadata(node: Any) -> dict[str, Any]:
    return cast(dict[str, Any], node.metadata)  # a property of nodes; its stub says method


def _overriding(kind: type[Any]) -> set[type[Any]]:
    return {k for sub in kind.__subclasses__() for k in {sub, *_overriding(sub)}}
