"""``MixedPrecisionManager``: the verbs of a training loop, and the order they are held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from halfstep.engine.account import Account, report
from halfstep.engine.binding import Binding
from halfstep.engine.bindings import Bindings
from halfstep.engine.check import Check
from halfstep.engine.contribute import Contributor, inputs_of
from halfstep.engine.group import Group, Groups, Weigher
from halfstep.engine.island import Islands, keep_fp32
from halfstep.engine.journal import Journal
from halfstep.engine.late import host
from halfstep.engine.ledger import Share
from halfstep.engine.position import Position, restore_random_state
from halfstep.engine.position import random_state as _random_state
from halfstep.engine.precision import Precision
from halfstep.engine.replicas import Replicas, resolve
from halfstep.engine.scale import LossScale
from halfstep.engine.schedule import Schedule, schedulers_of
from halfstep.engine.update import Update
from halfstep.engine.updater import Updater
from halfstep.engine.verification import Verification
from halfstep.engine.witness import Witnesses
from halfstep.errors import GroupError, MisuseError, NonFiniteError, PolicyError

ON_NONFINITE = ("skip", "raise", "ignore")
STATE_VERSION = 1
_SCALER_STATE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
Batch = TypeVar("Batch")


class MixedPrecisionManager:
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
    ``replicas``        who else contributes; None: one process
    ``monitor``         keep the gradient norm of every parameter and update (they come from the clipping pass)
    ``record``          called with every row of the journal as it is written; None keeps it in memory only

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
        monitor: bool = True,
        record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if isinstance(activated, (str, torch.device, torch.dtype)):
            raise PolicyError(
                f"activated={activated!r}: the first argument switches mixed precision on or off",
                f"MixedPrecisionManager(precision={str(activated)!r})" if activated in ("fp16", "bf16", "fp32")
                else "MixedPrecisionManager(True, precision=…, device=…)",
            )  # fmt: skip
        if max_norm is not None and not 0.0 < float(max_norm) < math.inf:
            raise PolicyError(f"max_norm={max_norm} is no norm", "a positive number, or None not to clip")
        if on_nonfinite not in ON_NONFINITE:
            raise PolicyError(f"unknown on_nonfinite {on_nonfinite!r}", f"one of {', '.join(map(repr, ON_NONFINITE))}")
        if record is not None and not callable(record):
            raise PolicyError(f"record={record!r} cannot be called", "a function that takes a plain dict")
        self.activated = bool(activated)
        self.precision = Precision(precision, device, activated=self.activated)
        self.max_norm = None if max_norm is None else float(max_norm)
        self.on_nonfinite = on_nonfinite
        self.monitor = bool(monitor)
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
        self._journal = Journal(record)
        self._account = Account()
        self._position = Position()
        self._verification = Verification(self._journal)
        self._contributor = Contributor(self.scaler, self.replicas, activated=self.activated)
        self._ledger = self._contributor.ledger
        self._witnesses = Witnesses()
        self._bindings = Bindings(self._noticed)
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
        self._updater.host = self._contributor.host = self.precision.device_type == "cpu"
        self._group: Group[Any] | None = None
        self._islands: list[Islands] = []
        self._islands_run = True
        self._checks: list[Check] = []
        self._sources: dict[str, int] = {}

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
        self._islands_run = False
        return islands

    def check(self, tensor: Tensor, name: str) -> Check:
        """Look for overflow in any tensor: the answer is read when asked for, and is in the record.

        With ``on_nonfinite="raise"`` a non-finite element raises :class:`~halfstep.errors.NonFiniteError` at once.
        """
        check = Check(tensor, name, self._account.attempted)
        self._checks.append(check)
        if self.on_nonfinite == "raise" and not check:
            raise NonFiniteError(
                f"{check.nonfinite} of {tensor.numel()} elements of {name!r} ({check.dtype}) are not finite",
                "keep the module it comes from in FP32 (manager.keep_fp32), or lower the loss scale",
            )
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
        contributor, group = self._contributor, self._group
        losses = contributor.losses(loss)
        if group is not None:
            contributor.expect(group)
        only = inputs_of(inputs)
        if not self.precision.settled or self.precision.device_type != losses[0].device.type:
            self._learn_device(losses[0].device)
        mode, source, factors, weights = contributor.normalise(losses, weight, group)
        ledger = self._ledger
        ledger.admit(mode, len(losses))
        self._witnesses.before(ledger.waits)
        if group is None:
            examples, micro_batch = None, len(ledger.pending)
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
        )
        if group is not None:
            group.contributed = True
        if not contribution.empty:
            if self._witnesses:
                self._witnesses.after()
            else:
                self._witnesses.first(contributor.leaves)

    def grad(self, outputs: Any, inputs: Any, **torch_kwargs: Any) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad`` through half precision: scaled on the way, unscaled when it returns.

        For penalties on gradients: ``create_graph=True``, then make the penalty part of the loss.
        """
        roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if not self.precision.settled:
            self._learn_device(roots[0].device)
        if not self.scaler.is_enabled():
            return tuple(torch.autograd.grad(outputs, inputs, **torch_kwargs))
        scale = self.scaler.on(roots[0].device)
        given = torch_kwargs.pop("grad_outputs", None)
        seeds = [None] * len(roots) if given is None else [given] if isinstance(given, Tensor) else list(given)
        scaled = [
            (torch.ones_like(root) if seed is None else seed) * scale.to(root.dtype)
            for root, seed in zip(roots, seeds, strict=True)
        ]
        gradients = torch.autograd.grad(roots, inputs, grad_outputs=scaled, **torch_kwargs)
        return tuple(None if g is None else g / scale.to(device=g.device, dtype=g.dtype) for g in gradients)

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
        self._contributor.drop()
        self._witnesses.clear()
        if self._group is not None:
            self._group.leave()
            self._group = None
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

        ``weight``     a function of a micro-batch (or a key) that counts its supervised elements, a sequence of them
                       where the loss has several terms; None reads them from the loss's graph, and counts examples,
                       unverified, where that cannot be read
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
        Raises without changing anything where the update would not be the one that was meant.
        """
        self._updater.settle()
        self._updater.require_scale()
        binding = self._bindings.find(model, optimizer)
        schedulers = schedulers_of(scheduler)
        self._schedule.require_untouched(schedulers)
        share = self._share(binding)
        self._require_intact(binding)
        self._bindings.require_own(binding, share, self._ledger.pending)
        if not self._islands_run and not share.empty:
            for islands in self._islands:
                islands.require_used()
            self._islands_run = True
        self._require_gradients(binding, share)
        if self._contributor.weigh:
            self._verify(share)
        shared = len(share) < len(self._ledger.pending)
        self._bindings.keep(binding)
        self._bindings.stepping = True
        try:
            update = self._updater.perform(
                binding, share, self._ledger.reference, self._contributor.buffers, schedulers, shared_scale=shared
            )
        finally:
            self._bindings.stepping = False
            if self._updater.performed(share):
                self._close(binding, share)
        return update

    def _close(self, binding: Binding, share: Share) -> None:
        """Put the books in order after an attempt."""
        number = self._account.attempted
        self._ledger.settle(share)
        self._bindings.settle(binding, share, number)
        source = share.contributions[0].source
        self._sources[source] = self._sources.get(source, 0) + 1
        self._contributor.weigh = number + 1 & number == 0
        self._contributor.look = self._contributor.weigh or len(self._bindings) > 1
        self._contributor.leaves = []
        self._witnesses.keep(binding.parameters, binding.ids, [b.ids for b in self._bindings])
        group = self._group
        if group is not None and not self._ledger.pending:
            if group.short:
                self._account.last_group(
                    kept=True, micro_batches=len(group), size=group.size, examples=group.examples, ids=group.ids
                )
            self._position.micro_batches += len(group)
            group.leave()
            self._group = None

    def _share(self, binding: Binding) -> Share:
        """The pending contributions of this optimizer; refuses an unfinished group and a step without backward."""
        group = self._group
        if group is not None and not group.whole:
            raise GroupError(
                f"step was called with {group.progress()} of group {group.index + 1} contributed: it would be divided "
                "by the weight of all of them",
                "let the loop over the group end before manager.step; after a break, manager.discard() drops the group",
            )
        share = self._ledger.share(binding.ids, None if group is None else group.weights)
        if not share:
            if self._ledger.pending:
                raise MisuseError(
                    f"none of the {len(self._ledger.pending)} pending contributions reached a parameter of this model",
                    "step the model whose loss was given to backward",
                )
            raise MisuseError(
                "step was called without a backward since the last one: there is nothing to update with",
                "manager.backward(loss) first; in a flat loop, step only if manager.pending",
            )
        return share

    def _require_intact(self, binding: Binding) -> None:
        """Raise what was noticed of verbs called by hand since the last update."""
        witnesses = self._witnesses
        witnesses.before(self._ledger.waits)
        if witnesses.fault is None and witnesses.moved():
            witnesses.fault = (
                "parameters changed while contributions were pending: the optimizer was stepped, or weights written",
                "manager.step(model, optimizer) instead of optimizer.step(); load weights between updates",
            )
        if witnesses.fault is not None:
            seen, fix = witnesses.fault
            raise MisuseError(seen, f"{fix}; manager.discard() drops what is pending")

    def _require_gradients(self, binding: Binding, share: Share) -> None:
        if share.empty or any(p.grad is not None for p in binding.parameters) or self._contributor.buffers:
            return
        raise MisuseError(
            f"none of the {len(binding.parameters)} parameters of the model has a gradient, after {len(share)} "
            "contributions",
            "the loss was computed by another copy of the model, or from parameters the model had before it was moved "
            "or replaced; or gradients were cleared by hand: leave zero_grad() out",
        )

    def _verify(self, share: Share) -> None:
        group = self._group
        if self._contributor.counted_examples is None:
            self._verification.hold(
                share,
                "mean" if group is None else group.reduction,
                share.micro_batches if group is None else group.size,
                self._account.attempted + 1,
            )

    # --- groups, from their own side ---

    def _close_group(self) -> None:
        """Called before another group is fetched: the one before must have been used."""
        group = self._group
        if group is None:
            return
        if group.whole:
            raise GroupError(
                f"group {group.index + 1} was contributed but not stepped before the next one was asked for",
                "manager.step(model, optimizer) after the loop over the group, or manager.discard()",
            )
        raise GroupError(
            f"group {group.index + 1} is still open with {group.progress()} contributed, and another one was asked "
            "for: the loop over it was left early, or groups were opened inside each other",
            "let the loop over a group end and step it; manager.discard() drops the open one",
        )

    def _open_group(self, group: Group[Any]) -> None:
        self._close_group()
        if self._ledger.pending:
            raise MisuseError(
                f"{len(self._ledger.pending)} contributions made outside any group are pending, and a group was "
                "opened: they have no common denominator",
                "manager.step before the group begins, or manager.discard()",
            )
        self._group = group

    def _learn_device(self, device: torch.device) -> None:
        """The first loss tells the device; precision and scale follow."""
        self.precision.settle(device)
        self.scaler.refresh(self.precision.device_type, self.precision.scaled)
        self._updater.host = self._contributor.host = device.type == "cpu"

    def _noticed(self, optimizer: str) -> None:
        """An optimizer this manager steps was stepped by somebody else."""
        self._witnesses.stepped(len(self._ledger.pending), optimizer)

    # --- settings, state, record ---

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1.0 where losses are not scaled. Settable between groups."""
        return self.scaler.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._ledger.pending or self._group is not None:
            raise MisuseError(
                f"the loss scale was set with {len(self._ledger.pending)} contributions pending: they carry the old "
                "one",
                "set it right after manager.step, before the next backward",
            )
        self._updater.settle()
        self.scaler.set(float(value), self._account.attempted)

    @property
    def scale_history(self) -> list[dict[str, Any]]:
        """Every move of the loss scale: {"update": attempted updates then, "scale": from there on, "why"}."""
        self._updater.settle()
        return [dict(entry) for entry in self.scaler.history]

    @property
    def norm_percentiles(self) -> dict[str, float] | None:
        """Percentiles (p10, p50, p90, p95, p99) of the gradient norm over the last 1000 applied updates."""
        self._updater.settle()
        return self._journal.percentiles()

    @property
    def suggested_max_norm(self) -> float | None:
        """The 90th percentile of those norms: a threshold that clips one update in ten. None before ten of them."""
        self._updater.settle()
        return self._journal.suggestion()

    def log(self, **metrics: Any) -> None:
        """Keep the user's own metrics against the number of applied updates; tensors of one element are read."""
        self._updater.settle()
        plain = {k: host(v) if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in metrics.items()}
        self._journal.log(self._account.applied, plain)

    def accept(self, reason: str) -> None:
        """A person's word that this run is accepted, with a reason: the record's last status."""
        if not reason or not isinstance(reason, str):
            raise PolicyError(f"accept was given the reason {reason!r}", "say in words why the run is accepted")
        self._account.accepted = {"reason": reason, "applied_updates": self._account.applied}

    def report(self) -> dict[str, Any]:
        """The final record, plain and JSON-able: see ``halfstep.report.run_page`` for a page of it."""
        self._updater.settle()
        return report(self)

    def policy(self) -> dict[str, Any]:
        """Every setting in force, defaults included."""
        scaler = self.scaler
        return {
            "activated": self.activated,
            "precision": repr(self.precision),
            "max_norm": self.max_norm,
            "scheduler_unit": self._schedule.unit,
            "on_nonfinite": self.on_nonfinite,
            "loss_scale": None
            if not scaler.is_enabled()
            else {
                "scale": scaler.value,
                "dynamic": scaler.dynamic,
                "growth_factor": scaler.get_growth_factor(),
                "backoff_factor": scaler.get_backoff_factor(),
                "growth_interval": scaler.get_growth_interval(),
                "min_scale": scaler.min_scale,
            },
            "replicas": self.replicas.describe(),
            "monitor": self.monitor,
        }

    def __repr__(self) -> str:
        parts = []
        for name, value in self.policy().items():
            if isinstance(value, dict):
                inner = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
                value = f"({inner})"
            elif name == "loss_scale":
                value = "none: only fp16 needs one"
            parts.append(f"{name}={value}")
        return f"MixedPrecisionManager({', '.join(parts)})"

    def state_dict(self, *, random_state: bool = False) -> dict[str, Any]:
        """Everything a new process needs to continue bit for bit, at an update boundary.

        "scaler" is a ``torch.amp.GradScaler`` state. ``random_state=True`` adds every generator's state, restored by
        ``load_state_dict``. Model, optimizer and scheduler are saved by their own ``state_dict``.
        """
        self._updater.settle()
        if self._ledger.pending:
            raise MisuseError(
                f"state_dict() with {len(self._ledger.pending)} contributions pending: they are in the gradients, "
                "which no checkpoint holds",
                "save right after manager.step; in a flat loop, step the tail first (if manager.pending)",
            )
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "scaler": self.scaler.full_state(),
            "scale_history": [dict(entry) for entry in self.scaler.history],
            "scale_touches": self.scaler.touches,
            "counters": self._account.counters(),
            "position": self._position.state(),
            "norms": self._journal.window(),
        }
        if random_state:
            state["random_state"] = _random_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of ``state_dict``, or a bare ``torch.amp.GradScaler`` state."""
        if self._ledger.pending:
            raise MisuseError(
                f"load_state_dict() with {len(self._ledger.pending)} contributions pending",
                "load before the first backward, or after manager.discard()",
            )
        self._updater.settle()
        self._schedule.forget()
        if not state or "counters" not in state:
            if state and not state.keys() >= _SCALER_STATE:
                raise PolicyError(
                    f"no state of a MixedPrecisionManager or a GradScaler: its keys are {sorted(map(str, state))}",
                    "manager.load_state_dict(checkpoint['manager']) with what manager.state_dict() gave",
                )
            if state:
                self.scaler.load_full_state(state, self._account.attempted)
            return
        if state["version"] > STATE_VERSION:
            raise PolicyError(
                f"the state has version {state['version']}, this halfstep reads up to {STATE_VERSION}",
                "update halfstep",
            )
        self._account.load(state["counters"])
        self.scaler.load_full_state(state["scaler"], self._account.attempted)
        self.scaler.restore_history(state["scale_history"], state["scale_touches"])
        self._contributor.weigh = self._account.attempted + 1 & self._account.attempted == 0
        self._position.load(state["position"])
        self._journal.load_window(state["norms"])
        if "random_state" in state:
            restore_random_state(state["random_state"])
