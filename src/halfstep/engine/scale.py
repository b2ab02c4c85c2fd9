"""The loss scale: torch's own scaler, moved once an update, with a floor and a history."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NoReturn

import torch
from torch import Tensor

from halfstep.engine.late import host
from halfstep.engine.settings import count, flag, number
from halfstep.errors import MisuseError, PolicyError
from halfstep.events.audience import LISTENERS

SCALE_MAX = 2.0**127  # the largest power of two FP32 holds
SCALE_MIN = 2.0**-126  # the smallest that FP32 holds with all its digits
FLOOR_TOUCHES = 3  # overflows in a row, at the floor, after which lowering the scale is known not to help
GRAD_SCALE = 2.0**15  # the largest power of two that is an FP16 number
GRAD_BACKOFF = 16.0
_HISTORY = 4096


class LossScale(torch.amp.GradScaler):
    """A :class:`torch.amp.GradScaler` that the manager alone moves.

    Readable as one (``get_scale()``, ``is_enabled()``, ``state_dict()``, which a GradScaler loads and the other way
    round, growth counter included). Its verbs that act on gradients are refused: the manager's verbs do that.

    ``dynamic=False`` keeps the scale where it is; overflows still skip. ``min_scale`` is a floor the scale is not
    lowered below.
    """

    def __init__(
        self,
        device_type: str,
        *,
        enabled: bool,
        dynamic: bool = True,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 2.0**-8,
    ) -> None:
        init_scale, min_scale = _scale("init_scale", init_scale), _scale("min_scale", min_scale)
        growth_factor = number("growth_factor", growth_factor, "a factor above 1 (torch's is 2)")
        if not 1.0 < growth_factor < math.inf:
            raise PolicyError(f"growth_factor={growth_factor} does not grow", "a factor above 1 (torch's is 2)")
        backoff_factor = number("backoff_factor", backoff_factor, "between 0 and 1 (torch's is 0.5)")
        if not 0.0 < backoff_factor < 1.0:
            raise PolicyError(f"backoff_factor={backoff_factor} does not lower", "between 0 and 1 (torch's is 0.5)")
        growth_interval = count("growth_interval", growth_interval, "a number of updates (torch's is 2000)")
        if growth_interval < 1:
            raise PolicyError(f"growth_interval={growth_interval}", "at least 1 update (torch's is 2000)")
        dynamic = flag("dynamic", dynamic)
        if dynamic and min_scale > init_scale:
            raise PolicyError(f"min_scale={min_scale:g} lies above init_scale={init_scale:g}", "a floor below it")
        super().__init__(
            device_type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=False,
        )
        # GradScaler keeps its settings only where it is enabled; "auto" may learn later that it is not needed.
        self._init_scale = init_scale
        self._scale: Tensor | None = None
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states: Any = {}
        self._enabled = enabled
        self.dynamic = dynamic
        self.min_scale = min_scale
        self.touches = 0
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        if enabled:
            self.note(0, "first")

    def on(self, device: torch.device) -> Tensor:
        """The scale as a 0-dim FP32 tensor, made on ``device`` the first time."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    @property
    def value(self) -> float:
        """The scale; 1.0 where losses are not scaled. On an accelerator this waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else host(self._scale)

    def settings(self) -> tuple[float, ...]:
        """What never changes: the policy that moves the scale."""
        return (self.dynamic, self._growth_factor, self._backoff_factor, self._growth_interval, self.min_scale)

    @property
    def device(self) -> torch.device:
        """Where the scale is."""
        return torch.device("cpu") if self._scale is None else self._scale.device

    @property
    def tracker(self) -> float | Tensor:
        """The finite attempts since the last move; on the device where it is."""
        return float(self._init_growth_tracker) if self._growth_tracker is None else self._growth_tracker

    def move(self, found_inf: Tensor, unless: Tensor | None = None) -> None:
        """Move once, after an attempt: ``found_inf`` is 0-dim FP32, 1.0 where something was not finite.

        ``unless``: 1.0 where, as the device found out, there was nothing to attempt.
        """
        if not self._enabled or not self.dynamic:
            return
        scale = self.on(found_inf.device)
        tracker = self._growth_tracker
        assert tracker is not None
        before = None if unless is None else (scale.clone(), tracker.clone())
        torch._amp_update_scale_(
            scale, tracker, found_inf, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        scale.clamp_(min=self.min_scale)
        if before is not None and unless is not None:
            scale.copy_(torch.where(unless > 0.0, before[0], scale))
            tracker.copy_(torch.where(unless > 0.0, before[1], tracker))

    def after(self, before: float, tracker: int, overflow: bool) -> float:
        """Where ``move`` takes a scale, computed on the host."""
        if not self.dynamic:
            return before
        if overflow:
            return max(before * self._backoff_factor, self.min_scale)
        grown = before * self._growth_factor
        return grown if tracker + 1 == self._growth_interval and grown <= torch.finfo(torch.float32).max else before

    def settle(self, update: int, before: float, after: float, overflow: bool) -> bool:
        """Keep what the attempt numbered ``update`` did to the scale; True where the floor was touched too often."""
        if after != before:
            self.note(update, "overflow" if overflow else "growth", after)
        at_floor = overflow and self.dynamic and before * self._backoff_factor < self.min_scale
        self.touches = self.touches + 1 if at_floor else 0
        return self.touches >= FLOOR_TOUCHES

    def set(self, value: float, update: int) -> None:
        """Set by hand. The growth counter starts anew, as after any move."""
        value = _scale("loss_scale", value)
        if not self._enabled:
            raise MisuseError(
                "loss_scale was set, but this run does not scale its losses", 'only precision="fp16" has a loss scale'
            )
        self._init_scale = value
        self._init_growth_tracker = 0
        if self._scale is not None:
            assert self._growth_tracker is not None
            self._scale.fill_(value)
            self._growth_tracker.zero_()
        self.note(update, "by hand", value)
        for listener in LISTENERS:
            listener.scale_set(self)

    def note(self, update: int, why: str, value: float | None = None) -> None:
        self.history.append({"update": update, "scale": self.value if value is None else value, "why": why})

    def refresh(self, device_type: str, enabled: bool) -> None:
        """Follow the precision once the device is known."""
        self._device = device_type
        if enabled and not self._enabled:
            self._enabled = True
            self.note(0, "first")
        self._enabled = enabled

    def grad(self, outputs: Any, inputs: Any, **torch_kwargs: Any) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad`` with outputs scaled and gradients unscaled.

        The scale only has to keep small values out of FP16's underflow, so it need not be the loss scale, which suits
        losses that average: it starts at most at 2^15, and where a gradient overflows under it, the backward is run
        again under a smaller one. What is not finite without a scale comes back as it is. The gradients are looked
        at for that: on an accelerator this waits.
        """
        if not self._enabled:
            return tuple(torch.autograd.grad(outputs, inputs, **torch_kwargs))
        roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        given = torch_kwargs.pop("grad_outputs", None)
        each = [given] * len(roots) if given is None or isinstance(given, Tensor) else list(given)
        seeds: list[Tensor] = [
            torch.ones_like(r) if seed is None else seed for r, seed in zip(roots, each, strict=True)
        ]
        torch_kwargs["retain_graph"] = True  # for another try; the graph goes with its outputs
        scale = min(self.value, GRAD_SCALE)
        while True:
            gradients = torch.autograd.grad(roots, inputs, grad_outputs=[s * scale for s in seeds], **torch_kwargs)
            if scale <= 1.0 or all(g is None or _finite(g) for g in gradients):
                return tuple(None if g is None else g / scale for g in gradients)
            scale = max(scale / GRAD_BACKOFF, 1.0)

    def full_state(self) -> dict[str, Any]:
        """The GradScaler state, kept even where the run does not scale (an FP32 run keeps what FP16 had found)."""
        enabled, self._enabled = self._enabled, True
        try:
            return super().state_dict()
        finally:
            self._enabled = enabled

    def load_full_state(self, state: dict[str, Any], update: int) -> None:
        """Load a GradScaler state, also into a run that does not scale (it waits there)."""
        enabled, self._enabled = self._enabled, True
        try:
            super().load_state_dict(state)
        finally:
            self._enabled = enabled
        self.touches = 0
        if enabled:
            self.note(update, "loaded")

    def restore_history(self, history: list[dict[str, Any]], touches: int) -> None:
        self.history = deque(history, maxlen=_HISTORY)
        self.touches = touches

    # The verbs of a scaler that would act behind the manager's back.
    def scale(self, outputs: Any) -> NoReturn:
        self._refuse("scale(loss)", "manager.backward(loss)")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        self._refuse("unscale_()", "manager.step(model, optimizer), which unscales and clips; update.grad_norm to read")

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("step()", "manager.step(model, optimizer)")

    def update(self, new_scale: float | Tensor | None = None) -> NoReturn:
        self._refuse("update()", "manager.step moves the scale; manager.loss_scale = … sets it between groups")

    def _refuse(self, verb: str, instead: str) -> NoReturn:
        raise MisuseError(f"manager.scaler.{verb} was called: the manager moves its scaler itself", instead)


def _scale(name: str, given: Any) -> float:
    fix = "a positive, finite number (2**16 is torch's first)"
    if name == "min_scale":
        fix = "a positive number (2**-8 is the default; under 2**-126 a scale would be 0 and divide by it)"
    value = number(name, given, fix)
    if not math.isfinite(value) or value < SCALE_MIN or value > SCALE_MAX:
        raise PolicyError(f"{name}={value} is no loss scale", fix)
    return value


def _finite(gradient: Tensor) -> bool:
    values = gradient.coalesce()._values() if gradient.is_sparse else gradient
    return bool(values.detach().isfinite().all())
