"""Who made a non-finite value, said once an update was attempted with it.

What a script handles itself (it discards the gradients and makes no attempt) is told as info. An overflow of gradients
that only the loss scale made too large is the scaler's business: it is no finding, however often it happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Contribution,
    Event,
    Finding,
    GradientsCleared,
    NonFinite,
    Place,
    ProbabilitiesSaturated,
    Raised,
)

_WAITING = 64
_SCALED = 16.0  # what a loss multiplied by so much is scaled by hand
_OFTEN = 0.3  # of the contributions that the script discards: no rare batch any more
_ROOTS = ("sqrt", "norm", "pow", "rsqrt", "linalg_vector_norm")


@dataclass(frozen=True, slots=True)
class Words:
    """What a finding says: its rule, its message, its fix."""

    rule: str
    message: str
    fix: str


class Culprits(BaseCheck):
    rules = (
        "forward-overflow",
        "nonfinite-inputs",
        "backward-nonfinite",
        "half-constant-overflow",
        "fully-masked-softmax",
        "saturated-half-probabilities",
        "epsilon-underflow",
        "half-reduction-overflow",
    )

    def __init__(self) -> None:
        self._waiting: list[NonFinite | ProbabilitiesSaturated] = []
        self._contributions: dict[int, float] = {}  # waiting contribution -> what its loss was multiplied by
        self._seen = 0
        self._wrong = 0
        self._parameters_wrong = False
        self._attempted_at: set[Place | None] = set()

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case NonFinite() | ProbabilitiesSaturated():
                self._waiting.append(event)
                del self._waiting[:-_WAITING]
            case Contribution():
                self._seen += 1
                self._contributions[event.number] = max((s.total for s in event.shares), default=1.0)
                if len(self._contributions) > _WAITING:
                    del self._contributions[next(iter(self._contributions))]
            case GradientsCleared() if self._waiting and story.micro_batches:
                if any(story.optimizer(i).live for i in event.optimizers):
                    yield from self._judge(story, handled=True)
            case Raised():
                yield from self._judge(story)
            case _:
                pass

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        self._attempted_at.add(update.attempt.at)
        if not self._waiting:
            return ()
        return list(self._judge(story, update=update.number))

    def end(self, story: Story) -> Iterable[Finding]:
        yield from self._judge(story, handled=bool(story.optimizers))

    def _judge(self, story: Story, handled: bool = False, update: int | None = None) -> Iterable[Finding]:
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            finding = self._finding(event, story)
            if finding is None:
                continue
            self._wrong += 1
            rare = handled and self._wrong <= max(1.0, _OFTEN * self._seen)
            yield Finding(**{**finding, "severity": "info" if rare else finding["severity"], "update": update})

    def _finding(self, event: NonFinite | ProbabilitiesSaturated, story: Story) -> dict[str, Any] | None:
        if isinstance(event, ProbabilitiesSaturated):
            return _saturated(event)
        words = self._words(event, story)
        if event.cause == "parameter":
            self._parameters_wrong = True
        if words is None:
            return None
        return {
            "rule": words.rule,
            "severity": "error",
            "message": words.message,
            "fix": words.fix,
            "at": event.at,
            "module": event.module,
            "operator": event.node or event.operator,
            "phase": event.phase,
            "evidence": {
                "micro_batch": event.micro,
                "dtype": event.dtype,
                "value": event.value,
                "largest_input": event.peak,
                "limit": event.limit,
                "in_float32": event.exact,
                "reached": event.reached,
                **{k: v for k in ("constant", "count", "of", "scale") if (v := getattr(event, k)) is not None},
            },
        }

    def _words(self, event: NonFinite, story: Story) -> Words | None:
        if event.cause == "operator" and event.in_optimizer and event.at in self._attempted_at:
            return None  # its own arithmetic: nonfinite-update-applied tells
        if event.cause == "constant" and event.constant == event.scale:
            return None  # a half-precision loss times the scale: it settles
        if event.cause == "operator":
            if event.phase == "backward":
                return self._backward(event)
            return _hidden(event) if event.reached == "gradient" and not _overflowed(event) else _forward(event)
        if event.cause == "parameter":
            if self._parameters_wrong or self._wrong or story.applied:
                return None  # an update wrote it: what made that one so has been told
            return Words(
                "nonfinite-inputs",
                f"{event.hint} holds {event.count} non-finite of {event.of} elements before the first update: "
                f"nobody gave it values, or a checkpoint brought them",
                "give every parameter its first values (torch.empty has none), and check what was loaded",
            )
        if event.in_optimizer and event.at in self._attempted_at:
            return None  # torch's own optimizer: its options tell
        explain = _CAUSES.get(event.cause)
        return explain(event) if explain is not None else None

    def _backward(self, event: NonFinite) -> Words | None:
        limit, exact = event.limit or math.inf, event.exact
        scale = event.scale if event.scale is not None else self._contributions.get(event.micro, 1.0)
        if exact is not None and math.isfinite(exact):
            if (event.scale is not None or scale >= _SCALED) and exact / max(scale, 1e-30) <= limit:
                return None  # a smaller loss scale holds it: that is what scalers find out
        elif exact is None and event.dtype == "float16" and event.value == "inf" and (event.scale or 1.0) > 1.0:
            return None
        made = f"{event.node} (the gradient of line {event.at.line})" if event.at else f"{event.node}"
        why = _gradient_reason(event)
        unscaled = ""
        if exact is not None and math.isfinite(exact):
            true = exact / scale
            unscaled = f"; without the loss scale it is {true:.3g}, more than {event.dtype} holds ({limit:g})"
        return Words(
            "backward-nonfinite",
            f"{made}{_module(event)} made {event.value} in {event.dtype} of finite gradients and values{why}{unscaled}",
            _gradient_fix(event),
        )


# -- one function a cause --------------------------------------------------------------------------------------------


def _forward(event: NonFinite) -> Words | None:
    if event.operator == "mul" and event.scale is not None and event.peak == event.scale and event.exact is not None:
        return None  # a half-precision loss times the scale: it settles
    name = _name(event)
    limit = event.limit or math.inf
    if event.exact is not None and math.isfinite(event.exact):
        message = (
            f"{name}{_module(event)} left the range of {event.dtype}: {_input(event)}, the result is up to "
            f"{event.exact:.4g} where {limit:g} is the largest number"
        )
        fix = f"compute it in float32: x = x.float() before {_call(event)}"
    else:
        message = f"{name}{_module(event)} made {event.value} of finite inputs ({_input(event)}), in float32 too"
        fix = f"keep its input away from there (an eps, a clamp) before {_call(event)}"
    if event.absorbed is not None:
        share = event.share or 0.0
        message += f"; {event.absorbed} hid it: {share:.0%} of its output is wrong, and the loss stays finite"
    return Words("forward-overflow", message, fix)


def _hidden(event: NonFinite) -> Words:
    """A value that the forward throws away (`torch.where`, an index) while its gradient is 0 times infinity."""
    return Words(
        "backward-nonfinite",
        f"{_name(event)}{_module(event)} made {event.value} of finite inputs ({_input(event)}); the forward hides it: "
        f"the loss is finite, its gradient is not (0 times infinity)",
        "put a safe value in before the operator, not after it: torch.where(ok, x, 1.0) inside, torch.where outside",
    )


def _overflowed(event: NonFinite) -> bool:
    return event.exact is not None and math.isfinite(event.exact)


def _input_words(event: NonFinite) -> Words:
    if event.count is None:
        where = f" by {event.hint}" if event.hint else ""
        return Words(
            "nonfinite-inputs",
            f"the micro-batch was not finite before the model saw it: {event.value} was made{where} in preparing it",
            "mend the preparation (a division by a standard deviation of 0, a log of 0), or drop such examples",
        )
    return Words(
        "nonfinite-inputs",
        f"not finite before the first operator: {event.hint}; no operator made it",
        "impute or drop such values where the data are loaded: keep = torch.isfinite(x).all(1)",
    )


def _masked(event: NonFinite) -> Words:
    return Words(
        "fully-masked-softmax",
        f"{event.count} of {event.of} rows of this softmax{_module(event)} are masked as a whole: nothing is left to "
        f"divide by, the row is NaN",
        "leave one position in every row, or fill with torch.finfo(scores.dtype).min instead of -inf",
    )


def _constant(event: NonFinite) -> Words:
    return Words(
        "half-constant-overflow",
        f"the constant {event.constant:g} became {'-' if (event.constant or 0) < 0 else ''}inf in {event.dtype}, whose "
        f"largest number is {event.limit:g}{_module(event)}, and it reached the {event.reached}",
        "take the constant from the dtype: torch.finfo(x.dtype).min",
    )


def _epsilon(event: NonFinite) -> Words:
    return Words(
        "epsilon-underflow",
        f"the epsilon {event.constant:g} is 0 in {event.hint}: what it should have kept from zero was zero, and "
        f"{event.node or event.operator}{_module(event)} made {event.value}",
        f"add it in float32 (x.float()), or take one that {event.hint} holds: 1e-4",
    )


def _probability(event: NonFinite) -> Words:
    return Words(
        "saturated-half-probabilities",
        f"{_name(event)}{_module(event)} of {event.dtype} probabilities: {event.count} elements of {event.hint} were "
        f"rounded to exactly 0 or 1, the result is {event.value}",
        "compute the loss on the logits: binary_cross_entropy_with_logits, cross_entropy, log_softmax",
    )


def _reduction(event: NonFinite) -> Words:
    return Words(
        "half-reduction-overflow",
        f"{_name(event)}{_module(event)} of {event.dtype} elements (at most {event.peak or 0:.4g}) is "
        f"{event.exact or math.inf:.4g}, the largest {event.dtype} number is {event.limit:g}",
        f"reduce in float32: x.float() before {_call(event)}, or {_call(event)}(dtype=torch.float32)",
    )


_CAUSES: dict[str, Callable[[NonFinite], Words]] = {
    "input": _input_words,
    "masked": _masked,
    "constant": _constant,
    "epsilon": _epsilon,
    "probability": _probability,
    "reduction": _reduction,
}


def _saturated(event: ProbabilitiesSaturated) -> dict[str, Any]:
    made = event.operator.strip("_")
    return {
        "rule": "saturated-half-probabilities",
        "severity": "error",
        "message": (
            f"a loss on {event.dtype} probabilities: {event.count} of {event.of} that {made} gave are exactly 0 or 1 "
            f"although the target says otherwise; their gradient is infinite or nothing"
        ),
        "at": event.at,
        "module": event.module,
        "operator": made,
        "phase": "forward",
        "evidence": {"micro_batch": event.micro, "dtype": event.dtype, "count": event.count, "of": event.of},
        "fix": "compute the loss on the logits: binary_cross_entropy_with_logits",
    }


# -- words -----------------------------------------------------------------------------------------------------------


def _name(event: NonFinite) -> str:
    return f"the cast to {event.dtype}" if event.operator in ("_to_copy", "copy_") else event.operator.strip("_")


def _call(event: NonFinite) -> str:
    return "it" if event.operator in ("_to_copy", "copy_", "addmm", "mm", "bmm") else event.operator.strip("_")


def _module(event: NonFinite) -> str:
    return f" in {event.module}" if event.module else ""


def _input(event: NonFinite) -> str:
    return f"its largest input is {event.peak:.4g}" if event.peak is not None else "its inputs are finite"


def _gradient_reason(event: NonFinite) -> str:
    node = (event.node or "").lower()
    if any(name in node for name in _ROOTS):
        return ": its derivative is infinite where the value is exactly 0"
    return f" (at most {event.peak:.3g})" if event.peak is not None else ""


def _gradient_fix(event: NonFinite) -> str:
    node = (event.node or "").lower()
    if any(name in node for name in _ROOTS):
        return "add an eps inside the root: (x.pow(2).sum(-1) + 1e-6).sqrt(), or mask the zeros before it"
    if event.exact is not None and math.isfinite(event.exact):
        return "compute this part in float32 (manager.keep_fp32, or x.float()): no loss scale mends it"
    return "keep its input away from the point where the derivative is infinite, before it and not after (torch.where)"
