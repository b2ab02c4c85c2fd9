"""Exceptions about dtypes that do not match, explained: half precision met FP32 where no autocast casts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfstep.checks.quoting import quoted
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import (
    AutocastEntered,
    AutocastLeft,
    Contribution,
    Event,
    Finding,
    FunctionFailed,
    HalfParameters,
    ModuleCalled,
    OptimizerMade,
    Raised,
)

_HALF = re.compile(r"\b(?:BFloat16|Half|HalfTensor|BFloat16Tensor|bfloat16|float16)\b")
_FULL = re.compile(r"\b(?:Float|FloatTensor|float|float32|Double|double|float64)\b")
_MATCH = re.compile(
    r"same (?:dtype|scalar type)|dtypes? match|dtype to be equal|scalar type|[Ff]ound dtype|does not match"
)
_UNSUPPORTED = re.compile(r"not implemented for|[Uu]nsupported|dtypes not supported|must be either")


def mismatch(event: Raised) -> bool:
    """Whether the exception says that half precision and FP32 met in one operator."""
    words = event.message
    if _UNSUPPORTED.search(words):
        return False
    return bool(_MATCH.search(words)) or (_HALF.search(words) is not None and _FULL.search(words) is not None)


class DtypesMet(BaseCheck):
    """Which fault of the script's made half precision and FP32 meet."""

    rules = ("custom-function-dtype", "autocast-off-needs-float", "checkpoint-loses-autocast")

    def __init__(self) -> None:
        self._entered: dict[int, AutocastEntered] = {}
        self._left: list[AutocastEntered] = []  # by the exception under way, the innermost first
        self._on: AutocastEntered | None = None  # the last region that was on
        self._half_parameters = False
        self._function: FunctionFailed | None = None

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case AutocastEntered():
                self._entered[event.region] = event
                self._left.clear()
                if event.enabled and event.dtype in ("float16", "bfloat16"):
                    self._on = event
            case AutocastLeft():
                entered = self._entered.pop(event.region, None)
                if event.raised and entered is not None:
                    self._left.append(entered)
            case ModuleCalled() | Contribution():
                self._left.clear()
            case OptimizerMade():
                self._half_parameters |= bool({"float16", "bfloat16"} & set(event.dtypes))
            case HalfParameters():
                self._half_parameters = True
            case FunctionFailed():
                self._function = event
            case Raised(type="AttributeError") if "_fwd_used_autocast" in event.message and self._function is not None:
                yield self._unprepared(event, self._function)
            case Raised() if mismatch(event) and self._on is not None:
                yield from self._explained(event, self._on)
            case _:
                pass

    def _explained(self, event: Raised, on: AutocastEntered) -> Iterable[Finding]:
        function = self._function
        if function is not None:
            yield self._recomputed(event, function, on) if function.recomputing else self._custom(event, function, on)
        elif not event.in_backward and not self._half_parameters and on.micro == event.micro:
            inner = self._left[0] if self._left else None
            if inner is None or not inner.enabled:
                yield self._off(event, inner, on)

    def _custom(self, event: Raised, function: FunctionFailed, on: AutocastEntered) -> Finding:
        missing = "custom_bwd" if function.wrapped else "custom_fwd and custom_bwd"
        saved = (
            "its forward ran under autocast, its backward does not: what it saved and the gradient differ in dtype"
            if function.phase == "backward"
            else f"under autocast in {on.dtype} its inputs differ in dtype, and inside it nothing casts them alike"
        )
        return Finding(
            rule="custom-function-dtype",
            severity="error",
            at=function.at or event.at,
            message=(
                f"{function.phase} of {function.function} met mixed dtypes without {missing}: {saved} ({quoted(event)})"
            ),
            evidence={"function": function.function, "phase": function.phase, "exception": event.message[:200]},
            phase=function.phase,
            fix=(
                f'@torch.amp.custom_fwd(device_type="{on.device}") on forward and '
                f'@torch.amp.custom_bwd(device_type="{on.device}") on backward (cast_inputs=torch.float32 for FP32)'
            ),
        )

    def _unprepared(self, event: Raised, function: FunctionFailed) -> Finding:
        return Finding(
            rule="custom-function-dtype",
            severity="error",
            at=function.at or event.at,
            message=(
                f"custom_bwd of {function.function} found nothing of custom_fwd on its context: forward is not wrapped "
                f"by it, or setup_context is separate ({quoted(event)})"
            ),
            evidence={"function": function.function, "exception": event.message[:200]},
            phase="backward",
            fix="wrap both, and let forward take ctx itself: @custom_fwd(...) def forward(ctx, ...)",
        )

    def _recomputed(self, event: Raised, function: FunctionFailed, on: AutocastEntered) -> Finding:
        return Finding(
            rule="checkpoint-loses-autocast",
            severity="error",
            at=function.at or event.at,
            message=(
                f"backward of {function.function} runs its forward again without the {on.dtype} autocast the first one "
                f"had: half-precision activations meet float32 weights ({quoted(event)})"
            ),
            evidence={"function": function.function, "autocast": on.dtype, "exception": event.message[:200]},
            phase="backward",
            fix=(
                "keep torch.get_autocast_dtype(device) and torch.is_autocast_enabled(device) in forward, enter "
                "torch.autocast with them in backward; or use torch.utils.checkpoint"
            ),
        )

    def _off(self, event: Raised, inner: AutocastEntered | None, on: AutocastEntered) -> Finding:
        where = "a region with autocast off" if inner is not None else "code outside the autocast region"
        return Finding(
            rule="autocast-off-needs-float",
            severity="error",
            at=event.at,
            message=(
                f"{where} received {on.dtype} values from an autocast region: nothing casts them there "
                f"({quoted(event)})"
            ),
            evidence={"dtype": on.dtype, "exception": event.message[:200]},
            fix="cast what enters: x.float()" if inner is not None else "cast what leaves the region: x.float()",
        )
