"""Carries an update out: attempt, scale, schedule, counters, journal, once nothing can be refused any more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.account import Account
from halfstep.engine.attempt import Attempt, Attempts, coalesce
from halfstep.engine.binding import Binding
from halfstep.engine.culprits import culprits, nonfinite_names
from halfstep.engine.journal import Journal
from halfstep.engine.late import Mail, host
from halfstep.engine.ledger import Share, Weight
from halfstep.engine.metrics import Metrics
from halfstep.engine.replicas.replicas import Replicas
from halfstep.engine.replicas.rows import Closing
from halfstep.engine.scale import FLOOR_TOUCHES, LossScale
from halfstep.engine.schedule import Schedule
from halfstep.engine.terms import TermBuffers
from halfstep.engine.update import Update
from halfstep.errors import NonFiniteError, ScaleFloorError
from halfstep.events.audience import LISTENERS

Number = float | Tensor


class Updater:
    """Performs attempts and settles what they came to."""

    def __init__(
        self,
        scale: LossScale,
        schedule: Schedule,
        replicas: Replicas,
        journal: Journal,
        account: Account,
        *,
        max_norm: float | None,
        on_nonfinite: str,
        monitor: bool,
    ) -> None:
        self._scale = scale
        self._schedule = schedule
        self._replicas = replicas
        self._journal = journal
        self._account = account
        self._attempts = Attempts(max_norm, on_nonfinite != "ignore")
        self._max_norm = max_norm
        self._on_nonfinite = on_nonfinite
        self._monitor = monitor
        self._measures = monitor or max_norm is not None or on_nonfinite != "ignore"
        self._unsettled: Callable[[], None] | None = None
        self._metrics: list[Metrics] = []  # that were logged since
        self._found: Tensor | None = None
        self._tried: list[Number] = []  # overflow flags of attempts under the scale that is still to move
        self._last: Share | None = None
        self._floor: tuple[list[str], Tensor | None] | None = None
        self._skipped: deque[tuple[int, Share, list[str], Tensor | None]] = deque()
        self.host = True
        """Whether device values can be read without waiting: the device is a CPU."""

    # --- before anything changes ---

    def settle(self) -> None:
        """Wait for the outcome of the last update, where it is not known yet."""
        if self._unsettled is not None:
            self._unsettled()
        while self._metrics:
            self._journal.log(self._account.applied, self._metrics.pop(0).read())

    def log(self, metrics: Metrics) -> None:
        """Keep metrics against the updates applied by now, which may not be known yet."""
        self._metrics.append(metrics)
        if self.host:
            self.settle()

    def explain(self, *, alone: bool = False) -> None:
        """Tell what was not finite in updates skipped since, on whichever rank. A collective, in ``step`` alone.

        ``alone``: what is known here, where no update may follow; all are still told together, should one.
        """
        skipped = list(self._skipped)
        if not alone:
            self._skipped.clear()
        for update, share, names, norms in skipped:
            told = culprits(None if alone else self._replicas, share)
            self._journal.note("not finite", f"{told}; in {nonfinite_names(names, norms)}", update=update)

    def performed(self, share: Share) -> bool:
        """Whether the attempt with this share has happened (and not been refused)."""
        return self._last is share

    # --- the update ---

    def perform(
        self,
        binding: Binding,
        share: Share,
        reference: Weight,
        buffers: TermBuffers,
        schedulers: tuple[Any, ...],
        *,
        shared_scale: bool,
        closing: Closing | None = None,
    ) -> Update:
        """Attempt the update and settle it. ``shared_scale``: other gradients under the same scale are still pending;
        ``closing``: what is pending on all replicas, where there are several.

        Raises :class:`NonFiniteError` under ``on_nonfinite="raise"`` before anything has changed, and
        :class:`ScaleFloorError` after an update that was skipped at the floor for the third time in a row.
        """
        lrs = binding.lrs()
        if closing is None:
            closing = Closing(share.weights, share.empty, False, share.examples)
        examples = closing.examples
        for listener in LISTENERS:
            listener.attempting(binding.optimizers)
        try:
            if closing.empty:
                attempt, values = self._empty(closing)
            else:
                attempt, values = self._attempt(binding, share, closing, reference, buffers)
        except BaseException:
            for listener in LISTENERS:
                listener.refused(binding.optimizers)
            raise
        names = (
            binding.names if attempt.norms is None or attempt.norms.numel() == len(binding.names) else binding.named()
        )
        late = not self.host and any(isinstance(values[key], Tensor) for key in ("found_inf", "empty", "scale"))
        if self._scale.is_enabled():
            self._move_scale(attempt, values, shared_scale)
            values["after"] = self._after(values, shared_scale, late, binding.device)
        if isinstance(lrs[0], Tensor):
            values["lr"] = lrs[0]
        binding.clear()
        self._last = share
        for listener in LISTENERS:
            listener.attempted(
                binding.optimizers,
                scaler=self._scale if self._scale.is_enabled() else None,
                divisor=values["divisor"],
                empty=values["empty"],
                moved=not shared_scale,
                schedule=self._schedule.unit,
            )

        account = self._account
        account.attempted += 1
        account.micro_batches += share.micro_batches
        account.add_examples(share.micro_batches, share.examples, examples)
        update = Update(
            account.attempted,
            share.micro_batches,
            self._replicas.degree,
            examples,
            account.examples,
            lrs,
            names,
            attempt.norms if self._monitor else None,
        )
        if late:
            self._settle_later(update, share, Mail(values), names, attempt.norms)
            self._schedule.move_at_once(schedulers, binding.optimizers, account.attempted)
        else:
            if not self.host or "lr" in values:
                values = {**Mail(values).read()}
            self._settle(update, share, values, names, attempt.norms)  # type: ignore[arg-type]
            self._schedule.move(schedulers, binding.optimizers, update.outcome, account.attempted)
            self.explain()
            self.require_scale()
        return update

    def _empty(self, closing: Closing) -> tuple[Attempt, dict[str, Number]]:
        """Nothing was supervised: nothing to attempt, and nothing to read off a device."""
        values: dict[str, Number] = {"loss": 0.0, "grad_norm": 0.0, "coefficient": 1.0, "divisor": 1.0}
        values |= {"scale": self._scale.value, "found_inf": 0.0, "empty": 1.0}
        values |= {f"W{index}": weight for index, weight in enumerate(closing.weights or ())}
        return Attempt(None, 1.0, 0.0, 1.0, 0.0), values

    def _attempt(
        self, binding: Binding, share: Share, closing: Closing, reference: Weight, buffers: TermBuffers
    ) -> tuple[Attempt, dict[str, Number]]:
        values: dict[str, Number] = {}
        scale: Number = self._scale.value if self.host else self._scale_now(binding.device)
        weights = closing.weights
        values["loss"] = share.loss(reference, weights)
        divisor = scale
        if share.mode == "along" and weights is not None:
            if buffers or (len(weights) > 1 and not self._replicas.local):  # a replica that ran dry has no buffers
                buffers.combine(binding.parameters, [_over(reference, w) for w in weights])
            else:
                divisor = scale * (weights[0] / reference)
        values["scale"] = scale
        for index, weight in enumerate(weights or ()):
            values[f"W{index}"] = weight

        if closing.local:
            self._replicas.average([p for p in binding.parameters if p.requires_grad])
        gradients = binding.gradients()
        binding.look(gradients)
        if binding.sparse:
            coalesce(binding.parameters)
            gradients = binding.gradients()
        folded = binding.folds()
        norms = total = None
        if self._measures or self._scale.is_enabled():
            norms, total = self._attempts.measure(binding, gradients, folded)
        if self.host or not folded or binding.damped or self._on_nonfinite == "raise":
            attempt = self._on_host(binding, gradients, values, divisor, norms, total, folded)
        else:
            empty = (_least(weights) == 0.0).float() if share.mode == "along" and _on_device(weights) else None
            values["empty"] = 0.0 if empty is None else empty
            attempt = self._attempts.on_device(binding, divisor, norms, total, empty)
        values["grad_norm"] = attempt.grad_norm
        values["coefficient"] = attempt.coefficient
        values["divisor"] = attempt.divisor
        values["found_inf"] = attempt.found_inf
        return attempt, values

    def _on_host(
        self,
        binding: Binding,
        gradients: list[Tensor],
        values: dict[str, Number],
        divisor: Number,
        norms: Tensor | None,
        total: Tensor | None,
        folded: bool,
    ) -> Attempt:
        """The attempt where the host knows the norm: read once, together with whatever else is on the device."""
        if self.host:
            read = math.nan if total is None else host(total)
        else:
            extra: dict[str, Number] = {"divisor": divisor, "total": math.nan if total is None else total}
            if self._scale.is_enabled():
                extra["tracker"] = self._scale.tracker
            values |= Mail(values | extra).read()
            divisor, read = values["divisor"], float(values["total"])
        assert not isinstance(divisor, Tensor)
        values["empty"] = 0.0
        if divisor == 0.0:  # W was read, and is 0
            values["empty"] = 1.0
            return Attempt(None, 1.0, 0.0, 1.0, 0.0)
        if self._on_nonfinite == "raise" and not math.isfinite(read):
            culprits = nonfinite_names(binding.named(), norms)
            raise NonFiniteError(
                f"the gradient of attempted update {self._account.attempted + 1} is not finite, in {culprits}; nothing "
                "was changed, its contributions are still pending",
                "manager.discard() drops them; manager.keep_fp32(model, …) for the layer at fault, a lower learning "
                'rate or first scale; on_nonfinite="skip" leaves such updates out',
            )
        return self._attempts.on_host(binding, gradients, divisor, norms, total, read, folded)

    def _scale_now(self, device: torch.device) -> Number:
        """The scale these gradients carry, without waiting: a copy, since it moves in place."""
        if not self._scale.is_enabled():
            return 1.0
        scale = self._scale.on(device)
        return scale.clone() if self._scale.dynamic else scale

    def _move_scale(self, attempt: Attempt, values: dict[str, Number], shared: bool) -> None:
        """The scale moves once, when no gradient produced under it is pending any more."""
        found, empty = attempt.found_inf, values["empty"]
        if isinstance(empty, Tensor) or empty == 0.0:
            self._tried.append(found)
        if shared or not self._tried:
            return
        tried, self._tried = self._tried, []
        device = self._scale.device
        if all(isinstance(found, float) for found in tried):
            if self._found is None:
                self._found = torch.zeros((), dtype=torch.float32, device=device)
            self._scale.move(self._found.fill_(max(tried)))
        else:
            found_inf = torch.stack([torch.as_tensor(f, dtype=torch.float32, device=device) for f in tried]).amax()
            self._scale.move(found_inf, unless=empty if isinstance(empty, Tensor) and len(tried) == 1 else None)

    def _after(self, values: dict[str, Number], shared: bool, late: bool, device: torch.device) -> Number:
        """The scale after the attempt, without a second wait for the device."""
        if late:
            return self._scale.on(device).clone()
        if self.host or "tracker" not in values:
            return self._scale.value
        if shared or values["empty"]:
            return values["scale"]
        return self._scale.after(float(values["scale"]), int(values["tracker"]), bool(values["found_inf"]))

    # --- what came of it ---

    def _settle_later(self, update: Update, share: Share, mail: Mail, names: list[str], norms: Tensor | None) -> None:
        def settle() -> None:
            if self._unsettled is settle:
                self._unsettled = None
                self._settle(update, share, mail.read(), names, norms)
                self._schedule.take_back(update.outcome)

        self._unsettled = settle
        update.wait_with(settle)

    def _settle(
        self, update: Update, share: Share, values: dict[str, float], names: list[str], norms: Tensor | None
    ) -> None:
        account = self._account
        overflow = values["found_inf"] != 0.0
        if values["empty"] != 0.0:
            outcome = "empty"
            values = values | {"loss": 0.0, "grad_norm": 0.0, "coefficient": 1.0, "divisor": 1.0}
            account.empty += 1
        elif overflow and self._on_nonfinite != "ignore":
            outcome = "skipped"
            account.skipped += 1
            if not self._replicas.local:
                self._skipped.append((update.attempted_updates, share, names, norms))
        else:
            outcome = "applied"
            account.applied += 1
        weights = tuple(values[key] for key in values if key[0] == "W") or None
        account.add_weight(None if weights is None else weights[0])
        scale, after = values["scale"], values.get("after")
        if after is not None and self._scale.settle(update.attempted_updates, scale, after, overflow):
            self._floor = (names, norms)
        update.fill(
            outcome=outcome,
            applied_updates=account.applied,
            loss=values["loss"],
            scale=scale,
            grad_norm=values["grad_norm"],
            clip_coefficient=values["coefficient"],
            weights=weights,
            weight_seen=account.weight,
            divisor=values["divisor"],
        )
        lr = values.get("lr")
        row = (
            update.attempted_updates,
            account.applied,
            outcome,
            values["loss"],
            scale,
            values["grad_norm"],
            values["coefficient"],
            None if weights is None else weights[0],
            update.micro_batches,
            update.examples,
            update.lr if lr is None else lr,
        )
        self._journal.update(row, names, norms if self._monitor else None, values["divisor"])

    def require_scale(self) -> None:
        """Raise where the loss scale has touched its floor again and again."""
        floor, self._floor = self._floor, None
        if floor is None:
            return
        path = ", ".join(f"{entry['scale']:g} ({entry['why']})" for entry in list(self._scale.history)[-8:])
        raise ScaleFloorError(
            f"the loss scale touched its floor of {self._scale.min_scale:g} at {FLOOR_TOUCHES} overflows in a row, "
            f"after {self._account.attempted} attempted updates: non-finite gradients in {nonfinite_names(*floor)}. "
            f"The scale went {path}",
            "a smaller scale cannot cure this: keep the layer at fault in FP32 (manager.keep_fp32), normalise before "
            'it, lower its learning rate, or use precision="bf16"; manager.check(tensor, name) finds the first '
            "non-finite activation",
        )


def _over(reference: Weight, weight: Weight) -> Weight:
    if isinstance(weight, Tensor):
        return torch.where(weight == 0.0, torch.zeros_like(weight), reference / weight)
    return 0.0 if weight == 0.0 else reference / weight


def _on_device(weights: tuple[Weight, ...] | None) -> bool:
    return any(isinstance(weight, Tensor) for weight in weights or ())


def _least(weights: tuple[Weight, ...] | None) -> Tensor:
    """The largest W: 0 only where nothing at all was supervised."""
    tensors = [w.reshape(()) for w in weights or () if isinstance(w, Tensor)]
    return torch.stack(tensors).amax()
