"""Backwards: each is a contribution, weighed on its own graph."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Contribution, GradientsTaken, Share
from halfstep.watch.autocasts import Autocasts, name_of
from halfstep.watch.culprit import Culprit
from halfstep.watch.gradients import Gradients, Mark
from halfstep.watch.halves import Halves
from halfstep.watch.losses import Losses
from halfstep.watch.patches import Patches
from halfstep.watch.perthread import PerThread
from halfstep.watch.place import by_engine, route
from halfstep.watch.scalers import Scalers
from halfstep.watch.stream import Late
from halfstep.watch.underflow import Underflow
from halfstep.weigh import Term, Weighing, weigh

if TYPE_CHECKING:
    from halfstep.watch.session import Session


class Backwards:
    def __init__(
        self,
        session: Session,
        gradients: Gradients,
        scalers: Scalers,
        autocasts: Autocasts,
        losses: Losses,
        halves: Halves,
        culprit: Culprit,
    ) -> None:
        self._session = session
        self._losses = losses
        self._gradients = gradients
        self._scalers = scalers
        self._autocasts = autocasts
        self._halves = halves
        self._underflow = Underflow(session)
        self._culprit = culprit

    _described: PerThread[dict[str, Any]] = PerThread(dict)  # what the running backward's loss was while it had a graph

    def install(self, patches: Patches) -> None:
        patches.around(torch.autograd, "backward", self._before, self._after, self._failed)
        patches.around(torch.autograd, "grad", None, self._after_grad)
        self._underflow.install(patches)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Weighing] | None:
        if torch._C._current_graph_task_id() != -1:
            return None  # a recomputation inside a backward (reentrant checkpointing) is no contribution of its own
        self._gradients.reconcile()
        roots = _roots(args, kwargs)
        if not roots and by_engine():
            return ()  # zeros, so that other ranks need not wait: nothing is contributed
        self._session.stream.micro += 1
        number, way = self._session.stream.micro, route()
        loss_at, divisions = self._losses.describe(roots[0], number, way) if roots else (None, ())
        self._described = {"number": number, "route": way, "loss_at": loss_at, "divisions": divisions}
        weighings = [weigh(root) for root in roots if root.numel() == 1 and root.grad_fn is not None]
        self._session.look.backward = True
        return weighings

    def _failed(self, token: Any, error: BaseException) -> None:
        if token is None:
            return
        self._session.look.backward = False
        for weighing in token:
            weighing.remove()

    def _after(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if token is None:
            return
        self._session.look.backward = False
        roots = _roots(args, kwargs)
        if token == ():
            self._gradients.settle()
            return
        announced = self._scalers.announced
        mark = self._scalers.mark_of(roots) if announced is None else announced.mark
        changes = {i: c for i, c in self._gradients.settle().items() if c.received}
        self._gradients.contributed(changes, mark)
        lost, lost_by = self._underflow.taken() or (None, None)
        if self._session.look.is_open:
            touched = [g for change in changes.values() for g in change.touched]
            self._culprit.trace(roots, touched, None if mark is None else mark.scale)
        opaque = next((w.opaque for w in token if w.opaque), None if token else "no graph")
        draft = self._session.stream.emit(
            Contribution,
            at=self._session.place(),
            optimizers={i: c.received for i, c in changes.items()},
            hooked=any(c.hooked for c in changes.values()),
            reached={i: c.reached for i, c in changes.items()},
            **self._described,
            scale=Late(mark.scale) if mark else None,
            scaler=mark.scaler if mark else None,
            opaque=opaque,
            loss=_value(roots, None if announced is None else mark),
            seeded=announced is not None and mark is not None,
            managed=announced is not None,
            undivided=announced is not None and announced.undivided,
            dtype=name_of(roots[0].dtype) if roots else "float32",
            device=roots[0].device.type if roots else "cpu",
            thread=threading.get_ident(),
            autocast=self._autocasts.last_half(),
            halves=self._halves.taken(),
            lost=lost,
            lost_by=lost_by,
            inside_autocast=self._autocasts.inside(roots[0].device.type) if roots else False,
            retain_graph=bool(kwargs.get("retain_graph", args[2] if len(args) > 2 else None)),
            create_graph=bool(kwargs.get("create_graph", args[3] if len(args) > 3 else False)),
        )
        for weighing in token:
            weighing.remove()
        draft.tensors = [tensor for weighing in token for tensor in weighing.late()]

        def finish(fields: dict[str, Any], numbers: Sequence[float]) -> None:
            read = iter(numbers)
            terms = [term for weighing in token for term in weighing.read([next(read) for _ in weighing.late()])]
            fields["shares"] = tuple(share(term) for term in terms)

        draft.finish = finish

    def _after_grad(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mark = self._scalers.mark_of(_roots(args, kwargs, "outputs"))
        at, graph = self._session.place(), bool(kwargs.get("create_graph", args[4] if len(args) > 4 else False))
        if mark is not None and self._gradients.hands is not None:
            self._gradients.hands.taken(result, mark, graph, at)
        self._session.stream.emit(
            GradientsTaken,
            at=at,
            scale=Late(mark.scale) if mark else None,
            scaler=mark.scaler if mark else None,
            create_graph=graph,
        )


def share(term: Term) -> Share:
    """The event's plain copy of a weighed term."""
    return Share(**{name: getattr(term, name) for name in Share.__slots__})


def _value(roots: list[torch.Tensor], seed: Mark | None) -> Late | None:
    """The number that backward starts from, the scale included."""
    if not roots or roots[0].numel() != 1:
        return None
    root = roots[0].detach()
    return Late(root if seed is None else root.reshape(()) * seed.scale.to(root.device))


def _roots(args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "tensors") -> list[torch.Tensor]:
    value = kwargs.get(name, args[0] if args else ())
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)]
