"""Loss scalers: their life, what they scaled, unscaled, stepped and updated, and what they refused.

A scaled loss is marked on its own graph node, so the backward that starts from it (or from a sum or quotient of it)
knows which scale it carries without a look at any value.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from halfstep.events import Attempt, Place, Refused, ScaleRead, ScalerMade, ScaleUpdated, StateLoaded, Unscaled
from halfstep.watch.gradients import Gradients, Mark
from halfstep.watch.halves import Halves
from halfstep.watch.patches import Patches
from halfstep.watch.perthread import PerThread
from halfstep.watch.stream import Draft, Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

Scaler = torch.amp.GradScaler
_MARK = "halfstep.scale"
_REACH = 24  # graph nodes looked through for the mark below a backward's root
_LINEAR = ("Add", "Sub", "Mul", "Div", "Neg", "Sum", "Mean", "View", "Select", "Clone", "ToCopy", "Stack", "Squeeze")
_READS = 64  # reads of the scale told for each line
_COMPARES = re.compile(r"[<>]|[=!]=|\b\w*(before|previous|prev|old|last)\w*\s*=", re.IGNORECASE)
_COMPUTES = re.compile(r"(\*|/)\s*[\w.\[\]'\"]*get_scale\(\)|get_scale\(\)\s*(\*|/)")


class _Call(NamedTuple):
    """A verb's call: on which scaler, for which optimizer; ``outer``: not made by the same verb of a subclass."""

    scaler: Scaler
    optimizer: torch.optim.Optimizer | None
    outer: bool


class Announcement(NamedTuple):
    """What halfstep's engine tells of a backward: the scale it carries, and whether it is still to be divided."""

    mark: Mark | None
    undivided: bool


class Scalers:
    def __init__(self, session: Session, gradients: Gradients, halves: Halves) -> None:
        self._session = session
        self._gradients = gradients
        self._halves = halves
        self._scales: dict[int, torch.Tensor] = {}
        self._reads: Counter[Place | None] = Counter()
        self.off: dict[int, Place | None] = {}  # where scalers were made that were switched off then
        self.loaded: dict[int, Place | None] = {}  # and where a state was loaded into them

    announced: PerThread[Announcement | None] = PerThread(lambda: None)  # of the engine's backward that is running
    _within: PerThread[Counter[str]] = PerThread(Counter)
    attempts: PerThread[list[Draft]] = PerThread(list)  # made inside the scaler.step that is running

    @property
    def stepping(self) -> bool:
        """Whether `scaler.step` is on the stack: an optimizer's update inside it is the scaler's."""
        return self._within["step"] > 0

    def install(self, patches: Patches) -> None:
        patches.around(Scaler, "__init__", None, self._after_init)
        patches.around(Scaler, "get_scale", None, self._after_get)
        verbs = {"unscale_": self._after_unscale, "step": self._after_step, "update": self._after_update}
        for kind in {Scaler, *_overriding(Scaler)}:
            own = vars(kind)
            if "scale" in own:
                patches.around(kind, "scale", None, self._after_scale)
            for verb, after in verbs.items():
                if verb in own:
                    patches.around(kind, verb, self._before(verb), self._closing(verb, after), self._failed(verb))
            if "load_state_dict" in own:
                patches.around(kind, "load_state_dict", None, self._after_load)

    def mark_of(self, roots: list[torch.Tensor]) -> Mark | None:
        """The scale carried by these roots, looked for in the first linear nodes of their graphs."""
        queue = [r.grad_fn for r in roots if r.grad_fn is not None]
        for node in queue:
            mark = _metadata(node).get(_MARK)
            if isinstance(mark, Mark):
                return mark
            if len(queue) < _REACH and node.name().startswith(_LINEAR):
                queue.extend(n for n, _ in node.next_functions if n is not None)
        return None

    # -- life ----------------------------------------------------------------------------------------------------

    def _after_init(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler: Scaler = args[0]
        ident, at = self._session.ident("scaler", scaler), self._session.place()
        if not scaler._enabled:
            self.off[ident] = at
        self._session.stream.emit(
            ScalerMade,
            at=at,
            scaler=ident,
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
        at = self._session.place()
        if ident in self.off:
            self.loaded[ident] = at
        self._session.stream.emit(StateLoaded, at=at, kind="scaler", ident=ident)

    def _after_get(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = self._session.place()
        if not args[0]._enabled or at is None or self._reads[at] >= _READS:
            return
        line = linecache.getline(at.file, at.line)
        if "get_scale" not in line:
            return  # `state_dict` asks too
        self._reads[at] += 1
        how = "computing" if _COMPUTES.search(line) else "comparing" if _COMPARES.search(line) else "plain"
        self._session.stream.emit(ScaleRead, at=at, scaler=self._session.ident("scaler", args[0]), how=how)

    def enter(self) -> None:
        """Somebody begins to do what `scaler.step` does."""
        self._within["step"] += 1
        self._gradients.busy += 1
        self.attempts.clear()

    def leave(self) -> None:
        self._close("step")

    def moved(self, scaler: Scaler) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scale has been moved: what it was, what it is."""
        return self._scales.pop(self._session.ident("scaler", scaler), None), self.scale_now(scaler)

    def scale_now(self, scaler: Scaler) -> torch.Tensor | None:
        ident = self._session.ident("scaler", scaler)
        known = self._scales.get(ident)
        scale = getattr(scaler, "_scale", None)  # a disabled scaler has none
        if known is None and isinstance(scale, torch.Tensor):
            known = self._scales[ident] = scale.detach().clone()
        return known

    # -- verbs ---------------------------------------------------------------------------------------------------

    def _after_scale(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler: Scaler = args[0]
        scale = self.scale_now(scaler)
        if scale is None or not scaler._enabled:
            return
        mark = Mark(self._session.ident("scaler", scaler), scale)
        for tensor in _flat(result):
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[_MARK] = mark
        if self._gradients.hands is not None:
            inputs = _flat(kwargs.get("outputs", args[1] if len(args) > 1 else ()))
            self._gradients.hands.scaled(inputs, result, scaler._scale, mark)

    def _before(self, verb: str) -> Any:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | torch.Tensor | None:
            scaler: Scaler = args[0]
            if not scaler._enabled:
                return None
            optimizer = kwargs.get("optimizer", args[1] if len(args) > 1 else None) if verb != "update" else None
            call = _Call(scaler, optimizer, self._within[verb] == 0)
            if call.outer and verb != "update":
                self._gradients.reconcile()
                if optimizer is not None:
                    self._halves.about_to_update(optimizer)
                if verb == "step":
                    self.attempts.clear()
            self._within[verb] += 1
            self._gradients.busy += 1
            return call

        return before

    def _closing(self, verb: str, after: Any) -> Any:
        def closing(call: _Call | None, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if call is None:
                return
            self._close(verb)
            if call.outer:
                after(call, args, kwargs)

        return closing

    def _failed(self, verb: str) -> Any:
        def failed(call: _Call | None, error: BaseException) -> None:
            if call is None:
                return
            self._close(verb)
            if call.outer and not (verb == "unscale_" and self.stepping):  # the step that called it tells
                self._session.stream.emit(
                    Refused,
                    at=self._session.place(),
                    verb=verb,
                    scaler=self._session.ident("scaler", call.scaler),
                    optimizer=None if call.optimizer is None else self._session.ledger.ident(call.optimizer),
                    type=type(error).__name__,
                    message=str(error)[:500],
                    closure=self._gradients.closures > 0,
                )

        return failed

    def _close(self, verb: str) -> None:
        self._within[verb] -= 1
        self._gradients.busy -= 1

    def _after_unscale(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.optimizer is None:
            return
        self._gradients.settle()
        divided = self._gradients.sharing(call.optimizer)  # no version counter tells
        self._gradients.unscaled(divided)
        scale = self.scale_now(call.scaler)
        found = _found_inf(call.scaler, call.optimizer)
        self._session.stream.emit(
            Unscaled,
            at=self._session.place(),
            scaler=self._session.ident("scaler", call.scaler),
            optimizer=self._session.ledger.ident(call.optimizer),
            scale=None if scale is None else Late(scale),
            found_inf=None if found is None else Late(found, bool),
            in_step=self.stepping,
            optimizers=divided,
        )

    def _after_step(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = call.optimizer
        if optimizer is None or self.stepping:
            return
        found = _found_inf(call.scaler, optimizer)
        ident = self._session.ident("scaler", call.scaler)
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
        self._gradients.attempted(optimizer)
        self._session.applied(draft.fields.get("at"))

    def _after_update(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ident = self._session.ident("scaler", call.scaler)
        before, after = self.moved(call.scaler)
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
    return {
        "parameters": len(parameters),
        "gradients": sum(p.grad is not None for p in parameters),
        "states": len(optimizer.state),
    }


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
