"""Gradients between backward and update: cleared, clipped, edited by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Clipped, GradientsCleared, GradientsEdited, GradientsRead, ParametersChanged
from halfstep.watch.ledger import Change
from halfstep.watch.patches import Patches
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_PROBED = 16  # gradients looked at to tell zeroing from other edits by hand


class Gradients:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._clipping = 0

    def install(self, patches: Patches) -> None:
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            patches.around(owner, "zero_grad", self._before_clear, self._after_clear)
        clip = torch.nn.utils.clip_grad
        for name, kind in (
            ("clip_grad_norm_", "norm"),
            ("clip_grad_value_", "value"),
            ("clip_grads_with_norm_", "norm"),
        ):
            patches.around(clip, name, self._before_clip, self._after_clip(kind), self._failed_clip)
        patches.around(clip, "get_total_norm", None, self._after_total_norm)

    # -- what happened unseen ------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Emit what the ledger shows to have happened since the last known call: edits and clearing by hand."""
        changes = self._session.ledger.compare()
        for ident, change in changes.items():
            if change.cleared:
                self._session.stream.emit(
                    GradientsCleared, optimizers={ident: change.cleared}, how="by hand", had=change.cleared
                )
            if change.received:
                self._edited(ident, change)
            if change.parameters:
                self._session.stream.emit(ParametersChanged, optimizers={ident: change.parameters})

    def settle(self) -> dict[int, Change]:
        """Take note of what a known call did, silently."""
        return self._session.ledger.compare()

    def _edited(self, ident: int, change: Change) -> None:
        grads = [g for g in change.touched[:_PROBED] if not g.is_sparse]
        fields: dict[str, Any] = {"optimizers": {ident: change.received}}
        if grads:
            with torch.no_grad():
                size = torch.stack([g.detach().abs().amax().to(torch.float32) for g in grads if g.numel()] or [_zero()])
            fields["zeroed"] = Late(size.amax(), lambda largest: largest == 0.0)
        self._session.stream.emit(GradientsEdited, **fields)

    # -- zero_grad -----------------------------------------------------------------------------------------------

    def _before_clear(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reconcile()

    def _after_clear(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        changes = self.settle()
        cleared = {i: c.cleared + c.accumulated for i, c in changes.items() if c.cleared or c.accumulated}
        owner = args[0] if args else None
        if isinstance(owner, torch.optim.Optimizer):
            cleared.setdefault(self._session.ledger.ident(owner), 0)
        if not cleared:
            return
        self._session.stream.emit(
            GradientsCleared, at=self._session.place(), optimizers=cleared, had=sum(cleared.values())
        )

    # -- clipping and reading ------------------------------------------------------------------------------------

    def _before_clip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._clipping += 1
        if self._clipping == 1:
            self.reconcile()

    def _failed_clip(self, token: Any, error: BaseException) -> None:
        self._clipping -= 1

    def _after_clip(self, kind: str) -> Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]:
        def after(token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._clipping -= 1
            if self._clipping:
                return
            name = "max_norm" if kind == "norm" else "clip_value"
            limit = kwargs.get(name, args[1] if len(args) > 1 else float("nan"))
            norm = result if isinstance(result, torch.Tensor) else kwargs.get("total_norm")
            # Clipping multiplies each gradient it is given: the ledger tells whose they were (a generator is spent).
            owners = {ident: change.received for ident, change in self.settle().items()}
            self._session.stream.emit(
                Clipped,
                at=self._session.place(),
                kind=kind,
                limit=_number(limit),
                norm=_late(norm),
                norm_type=float(kwargs.get("norm_type", args[2] if len(args) > 2 and kind == "norm" else 2.0)),
                optimizers=owners,
            )

        return after

    def _after_total_norm(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._clipping or not isinstance(result, torch.Tensor):
            return
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
