"""What a preflight runs: the engine's updates, the big batch, a look in FP32. Facts only; rows are made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.engine import settings
from halfstep.engine.binding import modules_of, plain_name
from halfstep.engine.manager import MixedPrecisionManager
from halfstep.errors import HalfstepError, MisuseError, NonFiniteError, PolicyError, UnsupportedError
from halfstep.probe.preflight import initialisation
from halfstep.probe.preflight.checklist import Row, failed, not_judged
from halfstep.probe.preflight.rehearsal import Rehearsal, Rehearsing
from halfstep.probe.same_update import SameUpdate, measured
from halfstep.probe.trial import Trial, unchanged
from halfstep.probe.whole import joined

MOST = 64  # micro-batches that are taken

LossFunction = Callable[[Any, Any], Tensor]


class Flight:
    """The facts of one preflight. ``run`` fills them in; it leaves the model as it was, random state apart."""

    def __init__(
        self,
        manager: MixedPrecisionManager,
        model: Any,
        loss_fn: LossFunction,
        batches: Iterable[Any],
        *,
        weight: Any,
        reduction: Literal["mean", "sum"],
        size: int | None,
        ids: Any,
    ) -> None:
        if manager.pending or manager._order.group is not None:
            raise MisuseError(
                f"preflight was called inside a group, with {manager.pending} contributions pending",
                "call it before the first group, or right after manager.step",
            )
        if reduction not in ("mean", "sum"):
            raise PolicyError(f'preflight was given reduction="{reduction}"', '"mean" (over its weight) or "sum"')
        if size is not None:
            fix = "the number of micro-batches of an update, 1 or more; None: all that are given"
            size = settings.count("size", size, fix)
            if size < 1:
                raise PolicyError(f"preflight was given size={size}", fix)
        if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            raise PolicyError(f"the micro-batches, of type {type(batches).__name__}, cannot be iterated", "a list")
        taken = list(itertools.islice(iter(batches), MOST + 1))
        if not taken:
            raise PolicyError("preflight was given no micro-batches", "a list of a few: those of one group, or of two")
        self.more = len(taken) > MOST
        self.batches = taken[:MOST]
        self.size = len(self.batches) if size is None else size
        self.group = self.batches[: self.size]
        self.manager = manager
        bare = [_bare(module) for module in modules_of(model)]
        single = isinstance(model, nn.Module)
        self.module = bare[0] if single else nn.ModuleList(bare)
        self.model: Any = bare[0] if single else bare
        self.given: Any = model
        self.given_loss = loss_fn
        self.loss_fn: LossFunction = loss_fn if single else lambda parts, batch: loss_fn(list(parts), batch)
        self.weight, self.reduction, self.ids = weight, reduction, ids
        sharded = sum(hasattr(p, "placements") for p in self.module.parameters())
        if sharded:
            raise UnsupportedError(
                f"{sharded} parameters of the model are sharded: preflight runs one rank's share by itself",
                "call it on the model before it is sharded",
            )
        self.names = {id(p): plain_name(name, self.module) for name, p in self.module.named_parameters()}
        self.twin = self.manager_like()
        self.found = Rehearsal(self.size)
        self.scale = 1.0
        """The loss scale that the first group's gradients fit under."""
        self.same_update: SameUpdate | None = None
        self.problem: Row | None = None
        """Why the accumulated gradient and the big batch's could not be compared."""
        self.accumulated: dict[str, Tensor] = {}
        """The sum of the weighed contributions, by hand, unscaled: what the engine's gradient has to be."""
        self.layers: list[initialisation.Layer] = []
        self.unseen = ""
        """Why the model could not be looked at in FP32."""
        self.unreached: set[str] = set()
        """Trainable parameters that the loss does not reach."""
        self.kept: int | None = None
        """Bytes one micro-batch keeps for its backward; None: out of memory."""

    def run(self, optimizers: Sequence[Any], scheduler: Any, big: Any, tolerance: float | None) -> None:
        twin, module = self.twin, self.module
        settings = {"weight": self.weight, "reduction": self.reduction, "ids": self.ids}
        with unchanged(module):
            rehearsing = Rehearsing(
                twin, self.model, module, optimizers, scheduler, lambda batch: self._loss(module, batch),
                self.batches, self.size, settings, self.names,
            )  # fmt: skip
            self.found = rehearsing.run()
        first = self.found.first
        self.scale = first.scale if first is not None and first.applied else twin.loss_scale
        self._each_way(big, tolerance)
        with unchanged(module):
            self._count_kept()
        with unchanged(module):
            self._look()

    def manager_like(self) -> MixedPrecisionManager:
        """A manager with the same policy and scale, of one process, that keeps no record."""
        changes = {"record": None, "replicas": 1, "on_nonfinite": "skip", "on_duplicate": "ignore"}
        twin = MixedPrecisionManager(**self.manager._settings | changes)
        twin.load_state_dict(self.manager.scaler.full_state())
        return twin

    def example_ids(self) -> list[list[Any]]:
        """What ``ids`` gives for each micro-batch."""
        twin = self.manager_like()
        ids = []
        for group in twin.groups(self.batches, 1, reduction="none", ids=self.ids):
            ids.append(list(group.ids or []))
            twin.discard()
        return ids

    def _loss(self, module: Any, batch: Any) -> Tensor:
        with self.twin.context():
            loss = self.loss_fn(module, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise MisuseError(f"loss_fn returned {shown}", "loss_fn(model, batch) returns one scalar loss")
        return loss

    def _each_way(self, big: Any, tolerance: float | None) -> None:
        """The accumulated gradient and the big batch's, under the scale that fits."""
        counted = self.found.weights
        if counted is None and self.weight is not None:
            counted = self._declared()
        if self.reduction == "sum":
            shares = [1.0] * len(self.group)
        elif counted and sum(counted) > 0:
            shares = [w / sum(counted) for w in counted]
        else:
            shares = [1.0 / len(self.group)] * len(self.group)
        found = self.found
        lost = bool(found.nonfinite) or any(w and not math.isfinite(loss) for loss, w in found.weighed())
        try:
            whole = joined(self.group) if big is None else big
            scale, (self.same_update, accumulated) = self._measured(whole, shares, tolerance)
        except PolicyError as error:
            self.problem = not_judged("gradient", error.seen, error.fix)
        except NonFiniteError as error:
            why = error.seen.replace("the loss of", "the scaled loss of")
            told = not_judged("gradient", f"{why} (see finite)")
            self.problem = told if lost else Row("gradient", "fail", why, error.fix)
        except HalfstepError as error:
            self.problem = failed("gradient", error)
        except torch.OutOfMemoryError:
            why = "the big batch does not fit into memory"
            self.problem = not_judged("gradient", why, "fewer, or smaller, micro-batches for the preflight")
        else:
            total = scale * (sum(counted) if self.reduction == "sum" and counted else 1.0)
            self.accumulated = {
                plain_name(name, self.module): gradient / total for name, gradient in accumulated.items()
            }

    def _measured(
        self, whole: Any, shares: list[float], tolerance: float | None
    ) -> tuple[float, tuple[SameUpdate, dict[str, Tensor]]]:
        """At the scale that fitted the group, or below it: the big batch's sums are larger than its parts'."""
        lower = self.scale

        def scaled(module: Any, batch: Any) -> Tensor:
            loss = self._loss(module, batch)
            return loss * lower if self.twin.scaler.is_enabled() else loss

        trial = Trial(self.module, scaled, self.group, whole, shares)
        while True:
            try:
                return lower, measured(trial, tolerance)
            except NonFiniteError:
                if not self.twin.scaler.is_enabled() or lower < self.scale / 1000:
                    raise
                lower /= 16

    def _declared(self) -> list[float] | None:
        """The weights of the first group, where the engine refused them."""
        twin = self.manager_like()
        group = next(iter(twin.groups(self.group, self.size, weight=self.weight, reduction=self.reduction)))
        weights = group.micro_weights
        twin.discard()
        return None if weights is None or len(weights[0]) != 1 else [entry[0] for entry in weights]

    def _count_kept(self) -> None:
        try:
            with initialisation.kept(self.module) as counted:
                self._loss(self.module, self.group[0])
            self.kept = counted["bytes"]
        except torch.OutOfMemoryError:
            self.kept = None

    def _look(self) -> None:
        try:
            self.layers = initialisation.look(self.module, lambda: self.loss_fn(self.module, self.group[0]))
        except Exception as error:  # a model or loss that runs under autocast only
            self.unseen = f"the model did not run in FP32: {type(error).__name__}: {error}"
            return
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        self.unreached = {self.names[id(p)] for p in trainable if p.grad is None}


def _bare(module: nn.Module) -> nn.Module:
    """The module inside a replica wrapper: one rank's share runs by itself."""
    if type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
        inner: nn.Module = module.module  # type: ignore[assignment]
        return inner
    return module
