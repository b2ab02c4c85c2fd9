"""``MixedPrecisionManager``: the verbs of a training loop, and the order they are held to."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from halfstep.engine.account import Account
from halfstep.engine.binding import Binding
from halfstep.engine.bindings import Bindings
from halfstep.engine.check import Check
from halfstep.engine.contribute import Contributor, inputs_of
from halfstep.engine.group import Weigher
from halfstep.engine.groups import Groups
from halfstep.engine.island import Islands, keep_fp32
from halfstep.engine.journal import Journal, Sink, sink_of
from halfstep.engine.ledger import Share
from halfstep.engine.order import Order
from halfstep.engine.position import Position
from halfstep.engine.precision import Precision
from halfstep.engine.quick import contribute_quickly
from halfstep.engine.records import Records
from halfstep.engine.replicas.identities import ON_DUPLICATE, Identities
from halfstep.engine.replicas.replicas import Replicas, fingerprint, resolve
from halfstep.engine.scale import LossScale
from halfstep.engine.schedule import Schedule, schedulers_of
from halfstep.engine.settings import ON_NONFINITE, activated_of, choice, flag, norm_of
from halfstep.engine.state import load, save
from halfstep.engine.update import Update
from halfstep.engine.updater import Updater
from halfstep.engine.verification import Verification
from halfstep.errors import MisuseError, counted
from halfstep.events.audience import LISTENERS

Batch = TypeVar("Batch")


class MixedPrecisionManager(Records):
    """Performs every optimizer update exactly: autocast, loss scale, accumulation, unscale, clip, update, schedule.

    ``activated``       False: the same verbs on a plain FP32 loop
    ``precision``       "fp32", "fp16", "bf16", or "auto": bf16 where the device computes it natively, else fp16
    ``device``          a device or its type; None: the accelerator where there is one, corrected by the first loss
    ``max_norm``        the gradient's 2-norm is clipped to this, once, unscaled; None does not clip
    ``scheduler_unit``  a scheduler given to ``step`` moves with "applied" updates, "attempted" updates, or on the
                        user's own "calls"
    ``on_nonfinite``    a non-finite gradient: "skip" the update, "raise" before it, or "ignore" (apply it)
    ``dynamic``, ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``
                        the loss scale, used under fp16: torch's own policy (2^16, ×2 after 2000 updates, ×0.5 on
                        overflow); ``dynamic=False`` keeps ``init_scale``
    ``min_scale``       a floor for it: the third overflow in a row that cannot lower it any more raises
    ``replicas``        who else contributes; None: what the model given to ``groups`` or ``step`` shows; for others a
                        process group or a mesh dimension; the wrapped model, where weights come outside ``groups``;
                        1 where every rank trains a model of its own, in no wrapper
    ``on_duplicate``    one example more than once in one update, where ids are known: "warn", "raise" or "ignore"
    ``monitor``         keep the gradient norm of every parameter and update (they come from the clipping pass)
    ``record``          where the journal of updates goes besides memory: a directory (``journal.jsonl``), or a function
                        that is called with every plain row

    A setting that cannot be meant raises :class:`~halfstep.errors.PolicyError`.
    """

    def __init__(
        self,
        activated: bool = True,
        *,
        precision: str = "auto",
        device: torch.device | str | None = None,
        max_norm: float | None = 2.0,
        scheduler_unit: str = "applied",
        on_nonfinite: str = "skip",
        dynamic: bool = True,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 2.0**-8,
        replicas: Any = None,
        on_duplicate: str = "warn",
        monitor: bool = True,
        record: Sink | str | os.PathLike[str] | None = None,
    ) -> None:
        self._settings = {name: value for name, value in locals().items() if name != "self"}
        self.activated = activated_of(activated)
        self.precision = Precision(precision, device, activated=self.activated)
        self.max_norm = norm_of(max_norm)
        self.on_nonfinite = choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
        self.on_duplicate = choice("on_duplicate", on_duplicate, ON_DUPLICATE)
        self.monitor = flag("monitor", monitor)
        self.replicas: Replicas = resolve(replicas)
        self.scaler = LossScale(
            self.precision.device_type,
            enabled=self.precision.scaled,
            dynamic=dynamic,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
        )
        self._schedule = Schedule(scheduler_unit)
        self.scheduler_unit = scheduler_unit
        self._journal = Journal(sink_of(record))
        self._account = Account()
        self._identities = Identities(self.on_duplicate, self._journal)
        self._position = Position()
        self._verification = Verification(self._journal)
        self._contributor = Contributor(self.scaler, self.replicas, activated=self.activated)
        self._ledger = self._contributor.ledger
        self._order = Order(self._contributor, self._position, self._account, self._journal)
        self._bindings = Bindings(self._order.stepped_by_hand)
        self._updater = Updater(
            self.scaler,
            self._schedule,
            self.replicas,
            self._journal,
            self._account,
            max_norm=self.max_norm,
            on_nonfinite=on_nonfinite,
            monitor=self.monitor,
        )
        self.replicas.settle = self._updater.settle
        self._updater.host = self._contributor.host = self.precision.device_type == "cpu"
        self._device: torch.device | None = None
        self._islands: list[Islands] = []
        self._checks: deque[Check] = deque(maxlen=1000)
        self._sources: dict[str, int] = {}
        self._built = frozenset(vars(self)) | {"_built"}

    # --- the forward ---

    def context(self) -> AbstractContextManager[Any]:
        """The region for a forward: autocast, or nothing for FP32. Backward belongs outside it."""
        return self.precision.region()

    def full_precision(self) -> AbstractContextManager[Any]:
        """A region in FP32 by hand, inside ``context()``. It casts nothing: call ``.float()`` on what comes in."""
        return self.precision.full()

    def keep_fp32(self, model: nn.Module, *patterns: str | type[nn.Module]) -> Islands:
        """Keep modules in FP32 inside autocast, forward and backward: see :func:`halfstep.engine.island.keep_fp32`.

        A matched module that has not run by the first update is an error there.
        """
        islands = keep_fp32(model, *patterns)
        self._islands.append(islands)
        self._order.unproven.append((model, islands))
        return islands

    def check(self, tensor: Tensor, name: str) -> Check:
        """Look for overflow in any tensor: the answer is read when asked for, and is in the record.

        With ``on_nonfinite="raise"`` a non-finite element raises :class:`~halfstep.errors.NonFiniteError` at once.
        """
        check = Check(tensor, name, self._account.attempted)
        self._checks.append(check)
        if self.on_nonfinite == "raise":
            check.require_finite()
        return check

    # --- contributions ---

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        weight: Any = None,
        *,
        inputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Add one contribution to the gradients: scaled, and normalised by its weight.

        ``loss`` is a scalar, or a list of terms with one denominator each. ``weight`` is the number of supervised
        elements the loss averaged over (a list: one a term); outside ``groups``, contributions with weights are
        divided by their sum, and one without is taken as the caller scaled it. Weight 0 contributes exactly nothing.
        ``inputs`` keeps the gradients to these parameters (or modules). Raises without changing anything when the
        loss or its place is wrong.
        """
        contributor, order = self._contributor, self._order
        group = order.group
        if inputs is None and not (retain_graph or create_graph):
            order.look()
            if contribute_quickly(contributor, loss, weight, group):
                order.contributed(False)
                return
        losses = contributor.losses(loss)
        if group is not None:
            contributor.expect(group)
        only = None if inputs is None else inputs_of(inputs)
        if losses[0].device != self._device:
            self._learn_device(losses[0].device)
        mode, source, factors, weights = contributor.normalise(losses, weight, group)
        ledger = self._ledger
        ledger.admit(mode, len(losses), None if only is None else frozenset(map(id, only)))
        contributor.require_only(losses, mode, only, group)
        order.look()
        if group is None:
            examples, micro_batch = None, ledger.number
            ledger.number += 1
        else:
            examples, micro_batch = group.example_counts[group.position], group.position
        contribution = contributor.run(
            losses,
            mode,
            source,
            factors,
            weights,
            only=only,
            retain_graph=retain_graph,
            create_graph=create_graph,
            examples=examples,
            micro_batch=micro_batch,
            grouped=group is not None,
        )
        contribution.filler = group is not None and group.filling
        order.contributed(contribution.empty)

    def grad(self, outputs: Any, inputs: Any, **torch_kwargs: Any) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad`` through half precision: scaled on the way, unscaled when it returns.

        For penalties on gradients: ``create_graph=True``, then make the penalty part of the loss. Under FP16 the scale
        is lowered until nothing overflows, which looks at the gradients: on an accelerator that waits.
        """
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        if first.device != self._device:
            self._learn_device(first.device)
        return self.scaler.grad(outputs, inputs, **torch_kwargs)

    @property
    def pending(self) -> int:
        """Contributions not yet used by a ``step``."""
        return len(self._ledger.pending)

    def discard(self) -> int:
        """Drop what is pending: gradients are cleared, an open group is closed. Returns the contributions dropped.

        The way back after an error in the middle of a group.
        """
        count = len(self._ledger.pending)
        self._bindings.clear()
        self._order.drop()
        return count

    def groups(
        self,
        loader: Iterable[Batch],
        size: int,
        *,
        weight: Weigher | str | int | None = None,
        reduction: str = "mean",
        drop_last: bool = False,
        model: nn.Module | None = None,
        ids: Weigher | str | int | None = None,
    ) -> Groups[Batch]:
        """Iterate over groups of ``size`` micro-batches of any iterable, one group an update.

        ``weight``     a function of a micro-batch (or a key) that counts its supervised elements; where the loss has
                       several terms, one function that returns a sequence, one count a term; None reads them from the
                       loss's graph, and counts examples, unverified, where that cannot be read
        ``reduction``  of the loss of a micro-batch: "mean" over its weight, "sum", or "none": already divided by
                       ``group.weight``
        ``drop_last``  drop a short last group; otherwise it gets its own denominator. The record tells which, with
                       the examples, and their ``ids`` where a function (or key) gives them
        ``model``      the module whose gradients replicas exchange

        The group is fetched before its first forward, and no more than the group.
        """
        return Groups(self, loader, size, weight=weight, reduction=reduction, drop_last=drop_last, model=model, ids=ids)

    # --- the update ---

    def step(self, model: Any, optimizer: Any, scheduler: Any = None) -> Update:
        """Attempt one update with the pending contributions: unscale, clip, step, scale, schedule, clear gradients.

        ``model`` is a module, or several: the set that is clipped and named; ``optimizer`` one, or several that share
        this backward: they own exactly the model's trainable parameters. ``scheduler`` moves in the manager's unit.
        Raises, with nothing changed, where the update would not be the one that was meant."""
        self._updater.settle()
        self._updater.require_scale()
        binding = self._bindings.find(model, optimizer)
        if not self.replicas.alone:
            self._meet(binding.modules)
            self._updater.explain()
        elif self.replicas.by_itself:
            self.replicas.meet(binding.modules)
        schedulers = schedulers_of(scheduler)
        self._schedule.require_fit(schedulers, binding.optimizers)
        share = self._order.share(binding)
        self._order.require_intact(binding, share)
        self._bindings.require_own(binding, share, self._ledger.pending)
        self._order.require_islands(binding)
        self._order.require_gradients(binding, share)
        self._order.verify(share, self._verification)
        self._order.require_precision(self.precision)
        closing = None if self.replicas.local else self._order.close(binding, share)
        shared = len(share) < len(self._ledger.pending)
        self._bindings.keep(binding)
        self._bindings.stepping = True
        try:
            update = self._updater.perform(
                binding,
                share,
                self._ledger.reference,
                self._contributor.buffers,
                schedulers,
                shared_scale=shared,
                closing=closing,
            )
        finally:
            self._bindings.stepping = False
            if self._updater.performed(share):
                self._close(binding, share)
        for listener in LISTENERS:
            listener.settled()
        return update

    def _close(self, binding: Binding, share: Share) -> None:
        """Put the books in order after an attempt."""
        number = self._account.attempted
        self._bindings.settle(binding, share, number)
        self._order.settle(binding, share, [b.ids for b in self._bindings])
        source = share.contributions[0].source if share else "none: this replica had nothing left"
        self._sources[source] = self._sources.get(source, 0) + 1
        self._contributor.weigh = _is_power_of_two(number + 1)
        self._contributor.look = self._contributor.weigh or len(self._bindings) > 1

    def _meet(self, modules: tuple[nn.Module, ...]) -> None:
        """Learn who the replicas are; what could not be verified of them is told once."""
        for note in self.replicas.meet(modules):
            self._journal.note("replicas", note)
            warnings.warn(f"halfstep: {note}", stacklevel=4)
        if self.replicas.sharded:
            for contribution in self._ledger.pending:
                contribution.leaves = None
        if not self.replicas.policy:
            settings = (self.activated, self.precision.declared, self.max_norm, self.scheduler_unit, self.on_nonfinite)
            self.replicas.policy = fingerprint(repr((*settings, self.scaler.settings())))

    def _learn_device(self, device: torch.device) -> None:  # the first loss tells
        self.precision.settle(device)
        self._device = device
        self.scaler.refresh(self.precision.device_type, self.precision.scaled)
        self._updater.host = self._contributor.host = device.type == "cpu"

    # --- settings, state, record ---

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1.0 where losses are not scaled. Settable between groups."""
        return self.scaler.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._ledger.pending or self._order.group is not None:
            raise MisuseError(
                f"the loss scale was set with {counted(self.pending, 'contribution')} pending: they carry the old one",
                "set it right after manager.step, before the next backward",
            )
        self._updater.settle()
        self.scaler.set(value, self._account.attempted)

    def state_dict(self, *, random_state: bool = False) -> dict[str, Any]:
        """Everything a new process needs to continue bit for bit, at an update boundary.

        "scaler" is a ``torch.amp.GradScaler`` state. ``random_state=True`` adds every generator's state, restored by
        ``load_state_dict``. Model, optimizer and scheduler are saved by their own ``state_dict``. With contributions
        pending it raises :class:`~halfstep.errors.MisuseError`.
        """
        self._updater.settle()
        return save(self, random_state)

    def load_state_dict(self, state: dict[str, Any], *, position: bool = True) -> None:
        """Load a state of ``state_dict``, or a bare ``torch.amp.GradScaler`` state.

        The next ``groups`` goes on where the saved one was: the micro-batches used in its epoch are drawn and dropped.
        ``position=False`` leaves that out, for a loader that the user restores.
        """
        self._updater.settle()
        load(self, state, position)
        self._journal.resumed(self._account.attempted, self._account.applied)
        self._schedule.forget()
        self._contributor.weigh = _is_power_of_two(self._account.attempted + 1)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
