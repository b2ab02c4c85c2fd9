"""Gradients between backward and update: cleared, clipped, edited by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Clipped, GradientsCleared, GradientsEdited, GradientsRead, ParametersChanged
from halfstep.watch.ledger import Change
from halfstep.watch.patches import Patches
from halfstep.watch.perthread import PerThread
from halfstep.watch.place import line_above
from halfstep.watch.stream import Late, norms_of, on_host

if TYPE_CHECKING:
    from halfstep.watch.hands import Hands
    from halfstep.watch.parameters import Parameters
    from halfstep.watch.session import Session

_REMOVES = r"\.grad\s*=\s*None\b"  # no call that could be seen: torch's attribute is set
_PROBED = 16  # gradients looked at to tell zeroing from other edits by hand
_DISCARDED = 64  # discarded scaled gradients that are looked at, then one in sixteen


class Mark:
    """The scale that a loss carries; ``scale`` is a copy that later updates do not move."""

    __slots__ = ("scale", "scaler")

    def __init__(self, scaler: int, scale: torch.Tensor) -> None:
        self.scaler = scaler
        self.scale = scale


class Gradients:
    """``carried``: optimizers whose gradients carry a loss scale now; ``busy``: torch's own code is at them.

    ``hands`` sees what the script does to gradients with operators, while a look is open.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._discarded = 0
        self.closures = 0  # optimizers that are running a closure
        self.moved = 0  # rises whenever gradients may have been made, replaced or removed
        self.carried: dict[int, Mark] = {}
        self.hands: Hands | None = None
        self.parameters: Parameters | None = None  # has seen, while a look is open, which parameters were written
        self._shared: dict[int, tuple[tuple[int, int], dict[int, int]]] = {}
        self._spread: tuple[int, int] | None = None  # non-finite gradients of those whose norm was taken

    _clipping = PerThread(int)
    busy = PerThread(int)

    def install(self, patches: Patches) -> None:
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            patches.around(owner, "zero_grad", self._before_clear, self._after_clear, self._failed_clear)
        clip = torch.nn.utils.clip_grad
        for name, kind in (
            ("clip_grad_norm_", "norm"),
            ("clip_grad_value_", "value"),
            ("clip_grads_with_norm_", "norm"),
        ):
            patches.around(clip, name, self._before_clip, self._after_clip(kind), self._failed_clip)
        patches.around(clip, "get_total_norm", None, self._after_total_norm)
        patches.around(clip, "_get_total_norm", None, self._after_any_norm)

    # -- what happened unseen ------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Emit what the ledger shows to have happened since the last known call: edits and clearing by hand."""
        told = self.hands.flush() if self.hands is not None else set()
        written = self.parameters.flush() if self.parameters is not None else set()
        self.moved += 1
        changes = self._session.ledger.compare()
        for ident, change in changes.items():
            if change.cleared and change.kept:  # some only, as freezing a layer by hand does
                self._session.stream.emit(GradientsEdited, optimizers={ident: change.cleared}, zeroed=False)
            elif change.cleared:
                self._session.stream.emit(
                    GradientsCleared,
                    at=line_above(_REMOVES),
                    optimizers={ident: change.cleared},
                    how="by hand",
                    had=change.cleared,
                )
            if change.received and ident not in told:
                self._edited(ident, change)
            if change.parameters and ident not in written:
                self._session.stream.emit(ParametersChanged, optimizers={ident: change.parameters})

    def settle(self) -> dict[int, Change]:
        """Take note of what a known call did, silently."""
        self.moved += 1
        return self._session.ledger.compare()

    # -- the scale they carry ------------------------------------------------------------------------------------

    def contributed(self, idents: Iterable[int], mark: Mark | None) -> None:
        if mark is not None:
            self.carried.update(dict.fromkeys(idents, mark))

    def sharing(self, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """The optimizers that own parameters of this one (itself too), with how many of them hold a gradient."""
        known = list(self._session.ledger.optimizers())
        own = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
        ident, state = self._session.ledger.ident(optimizer), (known[-1][0] if known else 0, len(own))
        told = self._shared.get(ident)
        if told is None or told[0] != state:
            owners = {i: sum(id(p) in own for g in o.param_groups for p in g["params"]) for i, o in known}
            told = self._shared[ident] = (state, {i: n for i, n in owners.items() if n})
        return told[1]

    def unscaled(self, idents: Iterable[int]) -> None:
        for ident in idents:
            self.carried.pop(ident, None)

    def attempted(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaled(self.sharing(optimizer) if len(self.carried) > 1 else (self._session.ledger.ident(optimizer),))

    def _nonfinite(self, owner: Any) -> Late | None:
        """Whether scaled gradients about to be discarded unused hold a non-finite value (a sample of them)."""
        waiting = [(i, o) for i, o in self._session.ledger.optimizers() if i in self.carried]
        if isinstance(owner, torch.optim.Optimizer):
            waiting = [(i, o) for i, o in waiting if o is owner]
        grads = [
            p.grad
            for _, optimizer in waiting
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and not p.grad.is_sparse
        ]
        if not grads or len({g.device for g in grads}) > 1:
            return None
        self._discarded += 1
        if self._discarded > _DISCARDED and self._discarded % 16:
            return None
        with torch.no_grad():
            total = norms_of(grads, 1.0).sum()
        return Late(total, lambda n: not abs(n) < float("inf"))

    def _edited(self, ident: int, change: Change) -> None:
        grads = [g for g in change.touched[:_PROBED] if not g.is_sparse]
        fields: dict[str, Any] = {"optimizers": {ident: change.received}}
        if grads and change.kept:
            fields["zeroed"] = False
        elif grads:
            with torch.no_grad():
                size = torch.stack([g.detach().abs().amax().to(torch.float32) for g in grads if g.numel()] or [_zero()])
            fields["zeroed"] = Late(size.amax(), lambda largest: largest == 0.0)
        self._session.stream.emit(GradientsEdited, **fields)

    # -- zero_grad -----------------------------------------------------------------------------------------------

    def _before_clear(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Late | None:
        self.reconcile()
        nonfinite = self._nonfinite(args[0] if args else None) if self.carried else None
        self.busy += 1
        return nonfinite

    def _failed_clear(self, token: Any, error: BaseException) -> None:
        self.busy -= 1

    def _after_clear(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.busy -= 1
        changes = self.settle()
        cleared = {i: c.cleared + c.accumulated for i, c in changes.items() if c.cleared or c.accumulated}
        owner = args[0] if args else None
        if isinstance(owner, torch.optim.Optimizer):
            cleared.setdefault(self._session.ledger.ident(owner), 0)
        if not cleared:
            return
        self.unscaled(cleared)
        self._session.stream.emit(
            GradientsCleared,
            at=self._session.place(),
            optimizers=cleared,
            had=sum(cleared.values()),
            nonfinite=token,
        )

    # -- clipping and reading ------------------------------------------------------------------------------------

    def _before_clip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._clipping += 1
        if self._clipping == 1:
            self.reconcile()
        self.busy += 1

    def _failed_clip(self, token: Any, error: BaseException) -> None:
        self._clipping -= 1
        self.busy -= 1

    def _after_clip(self, kind: str) -> Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]:
        def after(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._clipping -= 1
            self.busy -= 1
            if self._clipping:
                return
            name = "max_norm" if kind == "norm" else "clip_value"
            limit = kwargs.get(name, args[1] if len(args) > 1 else float("nan"))
            norm = result if isinstance(result, torch.Tensor) else kwargs.get("total_norm")
            # Clipping multiplies each gradient it is given: the ledger tells whose they were (a generator is spent).
            owners = {ident: change.received for ident, change in self.settle().items()}
            if self.hands is not None and isinstance(result, torch.Tensor) and kind == "norm":
                self.hands.measured(result, owners, self._session.place())
            self._session.stream.emit(
                Clipped,
                at=self._session.place(),
                kind=kind,
                limit=_number(limit),
                norm=_late(norm),
                norm_type=float(kwargs.get("norm_type", args[2] if len(args) > 2 and kind == "norm" else 2.0)),
                optimizers=owners,
                nonfinite=self._spread[0] if self._spread is not None else None,
                tensors=self._spread[1] if self._spread is not None else None,
            )
            self._spread = None

        return after

    def _after_any_norm(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A norm that is not finite, before clipping by it: how many gradients are so? On a CPU asking is free."""
        tensors = kwargs.get("tensors", args[0] if args else ())
        self._spread = None
        if not isinstance(tensors, (list, tuple)) or type(result) is not torch.Tensor or not result.is_cpu:
            return  # a sharded norm is read by a collective only
        if not math.isfinite(on_host(result)):
            bad = sum(not bool(torch.isfinite(t).all()) for t in _tensors(tensors))
            self._spread = (bad, len(tensors))

    def _after_total_norm(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._clipping or self._session.look.is_open or not isinstance(result, torch.Tensor):
            return  # a look tells what becomes of the norm, too
        tensors = kwargs.get("tensors", args[0] if args else ())
        owners = self.owners(_tensors(tensors))
        if owners or not isinstance(tensors, (list, tuple)):
            self._session.stream.emit(
                GradientsRead, at=self._session.place(), optimizers=owners, how="get_total_norm", value=_late(result)
            )

    def owners(self, tensors: Iterable[torch.Tensor]) -> Mapping[int, int]:
        """Optimizer number -> how many of these gradients are its own."""
        wanted = {id(t) for t in tensors}
        counts: dict[int, int] = {}
        for ident, optimizer in self._session.ledger.optimizers():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and id(p.grad) in wanted:
                        counts[ident] = counts.get(ident, 0) + 1
        return counts


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def _late(value: Any) -> Late | float | None:
    if isinstance(value, torch.Tensor):
        return Late(value.clone()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _number(value: Any) -> Any:
    return _late(value) if isinstance(value, torch.Tensor) else float(value)


def _zero() -> torch.Tensor:
    return torch.zeros(())
