"""Half-precision parameters: whether their updates arrive, whether they have an FP32 master, what their state keeps."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import Contribution, Event, Finding, ModuleCalled, MomentSampled, OptimizerMade, ParametersSampled

_UPDATES = 8  # attempts after which what never moved counts
_STILL = 0.5  # of the driven elements
_DRIVEN = 16  # elements, at least
_HIGH, _LOW = 1.3, 0.5  # a second moment so far from its FP32 twin
_SPACING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half the spacing, relative


class HalfParameters(BaseCheck):
    """Judges the last sample of each optimizer's half-precision parameters and of their second moments."""

    rules = ("updates-rounded-away", "no-master-weights", "optimizer-state-in-half")

    def __init__(self) -> None:
        self._made: dict[int, OptimizerMade] = {}
        self._samples: dict[int, ParametersSampled] = {}
        self._moments: dict[tuple[int, str], MomentSampled] = {}
        self._autocast: dict[int, str] = {}  # optimizer -> half dtype of the region its modules were called in
        self._called: set[int] = set()

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case OptimizerMade():
                self._made[event.optimizer] = event
            case ParametersSampled():
                self._samples[event.optimizer] = event
            case MomentSampled():
                old = self._moments.get((event.optimizer, event.key))
                if old is None or event.updates > old.updates or _distance(event) > _distance(old):
                    self._moments[(event.optimizer, event.key)] = event
            case ModuleCalled() if event.grad_enabled:
                self._called.update(event.optimizers)
                if event.autocast is not None:
                    self._autocast.update(dict.fromkeys(event.optimizers, event.autocast))
            case Contribution() if event.autocast is not None:  # a forward without a module of its own
                free = [i for i in event.optimizers if i not in self._called]
                self._autocast.update(dict.fromkeys(free, event.autocast))
            case _:
                pass
        return ()

    def end(self, story: Story) -> Iterable[Finding]:
        for ident, sample in self._samples.items():
            if self._stands(sample):
                yield self._rounded_away(ident, sample)
            elif ident in self._autocast:
                yield self._no_master(ident, sample)
        for (ident, _), moment in self._moments.items():
            ratio = moment.ratio
            if ratio is not None and (ratio >= _HIGH or ratio <= _LOW):
                yield self._state(ident, moment, ratio)

    def _stands(self, sample: ParametersSampled) -> bool:
        return (
            sample.updates >= _UPDATES
            and sample.driven >= _DRIVEN
            and sample.still >= _STILL * sample.driven
            and sample.rounding not in ("kahan", "master", "stochastic")
        )

    def _rounded_away(self, ident: int, sample: ParametersSampled) -> Finding:
        made = self._made.get(ident)
        share = sample.still / sample.driven
        return Finding(
            rule="updates-rounded-away",
            severity="error",
            at=sample.at or (made.at if made is not None else None),
            update=sample.updates,
            message=(
                f"{share:.0%} of the {sample.dtype} parameter elements that had a gradient hold the very value they "
                f"had {sample.updates} updates before: an update below {_SPACING.get(sample.dtype, 0.0):.1e} of the "
                f"weight rounds to nothing"
            ),
            evidence={
                "elements": sample.elements,
                "with_gradient": sample.driven,
                "never_moved": sample.still,
                "updates": sample.updates,
                "dtype": sample.dtype,
            },
            fix=f"keep the parameters in float32 and compute under torch.autocast(device, dtype=torch.{sample.dtype})",
        )

    def _no_master(self, ident: int, sample: ParametersSampled) -> Finding:
        made = self._made.get(ident)
        intended = sample.rounding != ""
        how = {"stochastic": "rounds at random", "kahan": "carries the rounding error", "master": "keeps FP32 copies"}
        message = f"trainable parameters are {sample.dtype} themselves under {self._autocast[ident]} autocast"
        if intended:
            message += f"; the optimizer {how[sample.rounding]}, which is meant for that"
        else:
            message += ": no FP32 copy keeps what an update smaller than their spacing adds"
        return Finding(
            rule="no-master-weights",
            severity="info" if intended else "warning",
            at=sample.at or (made.at if made is not None else None),
            message=message,
            evidence={
                "dtype": sample.dtype,
                "autocast": self._autocast[ident],
                "rounding": sample.rounding or None,
                "with_gradient": sample.driven,
                "never_moved": sample.still,
                "updates": sample.updates,
            },
            fix="drop the cast of the model: autocast casts the weights where it computes, parameters stay float32",
        )

    def _state(self, ident: int, moment: MomentSampled, ratio: float) -> Finding:
        made = self._made.get(ident)
        lost = "its decay rounds to nothing" if ratio > 1 else "what is added to it rounds to nothing"
        return Finding(
            rule="optimizer-state-in-half",
            severity="warning",
            at=made.at if made is not None else None,
            update=moment.updates,
            message=(
                f"the second moment {moment.key} is kept in {moment.dtype} with a decay of {moment.beta:g}: {lost}, "
                f"after {moment.updates} updates it stands at {ratio:.2g} times what FP32 holds"
            ),
            evidence={
                "key": moment.key,
                "dtype": moment.dtype,
                "beta": moment.beta,
                "ratio": ratio,
                "unchanged": moment.unchanged,
                "updates": moment.updates,
            },
            fix="keep parameters and optimizer state in float32 (compute under autocast), or use a smaller beta2",
        )


def _distance(event: MomentSampled) -> float:
    ratio = event.ratio
    return 0.0 if ratio is None or ratio <= 0 else max(ratio, 1 / ratio)
