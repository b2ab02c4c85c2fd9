"""Half-precision parameters and optimizer state: whether they really move, compared on a sample of their elements.

A parameter's sample is kept from before the first attempt; looked at again after attempts 8, 16, 32 and so on, elements
that had a gradient and still hold the very same value have lost every update to rounding. A second moment is followed
by the same average in FP32.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import MomentSampled, ParametersSampled, Place
from halfstep.watch.halves import HALF, Halves
from halfstep.watch.look import Operation
from halfstep.watch.parameters import Parameters
from halfstep.watch.patches import Patches
from halfstep.watch.sources import casts, line_of
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

Optimizer = torch.optim.Optimizer

_ELEMENTS = 1 << 15  # of an optimizer's parameters looked at
_TENSORS = 64
_MOMENTS = 2  # tensors whose second moment is followed
_FOLLOWED = 512  # elements of each
_FIRST = 8
_SECOND = {"exp_avg_sq", "square_avg", "avg_sq", "second_moment", "v", "nu", "sq", "exp_avg_sqs"}
_ORDINARY = _SECOND | {
    "exp_avg",
    "momentum_buffer",
    "max_exp_avg_sq",
    "acc_delta",
    "grad_avg",
    "sum",
    "m",
    "mu",
    "step",
}
_DRAWS = {"random_", "randint", "randint_like", "rand_like", "rand", "uniform_", "bernoulli_", "bernoulli", "normal_"}


class _Sample:
    """Elements of an optimizer's half-precision parameters as they were, and which of them had a gradient since."""

    __slots__ = ("at", "driven", "dtype", "last", "old", "parameters", "rounding", "steps")

    def __init__(self, parameters: list[torch.Tensor], at: Place | None) -> None:
        total = sum(p.numel() for p in parameters)
        self.parameters = [weakref.ref(p) for p in parameters]
        self.steps = [max(1, total // _ELEMENTS)] * len(parameters)
        self.old = [_pick(p, s).clone() for p, s in zip(parameters, self.steps, strict=True)]
        self.driven = [torch.ones_like(o, dtype=torch.bool) for o in self.old]
        self.dtype = HALF[parameters[0].dtype]
        self.at = at
        self.rounding = ""
        self.last = 0

    def note_gradients(self) -> None:
        for ref, step, driven in zip(self.parameters, self.steps, self.driven, strict=True):
            parameter = ref()
            if parameter is None or parameter.grad is None or parameter.grad.is_sparse:
                driven.zero_()
            else:
                driven &= _pick(parameter.grad, step) != 0

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements that had a gradient whenever looked at, and those of them that never moved."""
        driven, still = [], []
        for ref, step, old, mask in zip(self.parameters, self.steps, self.old, self.driven, strict=True):
            parameter = ref()
            if parameter is not None:
                driven.append(mask.sum())
                still.append((mask & (_pick(parameter, step) == old)).sum())
        return torch.stack(driven).sum(), torch.stack(still).sum()


class _Moment:
    """One second moment beside its FP32 twin."""

    __slots__ = ("beta", "decay", "gradient", "held", "key", "parameter", "step", "twin", "unchanged")

    def __init__(self, parameter: torch.Tensor, key: str, beta: float, decay: float, stored: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.key = key
        self.beta = beta
        self.decay = decay  # of weights, where it is added to the gradient
        self.step = max(1, parameter.numel() // _FOLLOWED)
        self.twin = _pick(stored, self.step).to(torch.float32, copy=True)
        self.held = _pick(stored, self.step).clone()
        self.gradient: torch.Tensor | None = None
        self.unchanged: torch.Tensor | None = None


class Rounding:
    """A witness of attempts."""

    def __init__(self, session: Session, parameters: Parameters, halves: Halves) -> None:
        self._session = session
        self._halves = halves
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._samples: dict[int, _Sample | None] = {}  # optimizer -> its sample; None: no half parameters
        self._moments: dict[int, list[_Moment]] = {}
        self._numbers: dict[int, int] = {}
        self._draws = _Draws(parameters)
        parameters.witnesses.append(self)

    def install(self, patches: Patches) -> None:
        patches.around(Optimizer, "load_state_dict", None, self._after_load)
        if self._draws not in self._session.look.lenses:
            self._session.look.lenses.append(self._draws)

    def remove(self) -> None:
        """The run is over: say where the samples stand now."""
        for ident, sample in self._samples.items():
            number = self._numbers.get(ident, 0)
            if sample is not None and number > sample.last and number >= _FIRST // 2:
                self._emit(ident, sample, number)
        for ident, moments in self._moments.items():
            self._emit_moments(ident, moments, self._numbers.get(ident, 0))

    def _after_load(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._moments.pop(self._session.ledger.ident(args[0]), None)

    def before(self, optimizer: Optimizer, ident: int, number: int) -> None:
        self._numbers[ident] = number
        if ident not in self._samples:
            self._samples[ident] = self._begin(optimizer)
        sample = self._samples[ident]
        if sample is not None and number & (number - 1) == 0:
            sample.note_gradients()
        for moment in self._moments.get(ident, ()):
            self._take(moment, optimizer)

    def after(self, optimizer: Optimizer, ident: int, number: int) -> None:
        sample = self._samples.get(ident)
        if sample is not None:
            if number == 1:
                sample.rounding = _intent(optimizer)
            if ident in self._draws.drew and not sample.rounding:
                sample.rounding = "stochastic"
            if number == 1 or (number >= _FIRST and number & (number - 1) == 0):
                self._emit(ident, sample, number)
        moments = self._moments.get(ident)
        if moments:
            self._follow(ident, optimizer, number)
        elif moments is None or number & (number - 1) == 0:  # a script may cast its state later on
            self._moments[ident] = _second_moments(optimizer)
            self._optimizers[ident] = weakref.ref(optimizer)

    # -- parameters ----------------------------------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer) -> _Sample | None:
        half = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.dtype in HALF and p.requires_grad and p.grad is not None and type(p.data) is torch.Tensor and p.numel()
        ]
        if not half or len({p.device for p in half}) > 1:
            return None
        stride = max(1, len(half) // _TENSORS)
        at = self._halves.origin(half[0])[0] or line_of(self._session.place(), casts)
        return _Sample(half[::stride], at)

    def _emit(self, ident: int, sample: _Sample, number: int) -> None:
        sample.last = number
        with torch.no_grad():
            driven, still = sample.counts()
        self._session.stream.emit(
            ParametersSampled,
            at=sample.at,
            optimizer=ident,
            dtype=sample.dtype,
            updates=number,
            elements=sum(o.numel() for o in sample.old),
            driven=Late(driven, int),
            still=Late(still, int),
            rounding=sample.rounding,
        )

    # -- second moments ------------------------------------------------------------------------------------------

    def _take(self, moment: _Moment, optimizer: Optimizer) -> None:
        parameter = moment.parameter()
        grad = None if parameter is None else parameter.grad
        if grad is None or parameter is None or grad.is_sparse or getattr(optimizer, "grad_scale", None) is not None:
            moment.gradient = None
            return
        with torch.no_grad():
            moment.gradient = _pick(grad, moment.step).float()
            if moment.decay:
                moment.gradient = moment.gradient + moment.decay * _pick(parameter, moment.step).float()

    def _follow(self, ident: int, optimizer: Optimizer, number: int) -> None:
        moments = self._moments[ident]
        due = number >= 8 * _FIRST and number & (number - 1) == 0
        for moment in moments:
            parameter = moment.parameter()
            if moment.gradient is None or parameter is None:
                continue
            stored = optimizer.state[parameter].get(moment.key)
            if stored is None:
                continue
            with torch.no_grad():
                square = moment.gradient.square()
                now = _pick(stored, moment.step)
                moment.twin.lerp_(square, 1 - moment.beta)
                if due:
                    below = square < moment.held.float()
                    moment.unchanged = (below & (now == moment.held)).sum() / below.sum().clamp(min=1)
                moment.held = now.clone() if due or number & (number + 1) == 0 else moment.held
        if due:
            self._emit_moments(ident, moments, number)

    def _emit_moments(self, ident: int, moments: list[_Moment], number: int) -> None:
        for moment in moments:
            parameter = moment.parameter()
            if parameter is None or number < 8 * _FIRST:
                continue
            ref = self._optimizers.get(ident)
            optimizer = ref() if ref is not None else None
            stored = optimizer.state[parameter].get(moment.key) if optimizer is not None else None
            if stored is None:
                continue
            with torch.no_grad():
                ratio = (_pick(stored, moment.step).float() / moment.twin.clamp(min=1e-30)).median()
            self._session.stream.emit(
                MomentSampled,
                optimizer=ident,
                key=moment.key,
                dtype=HALF[stored.dtype],
                beta=moment.beta,
                updates=number,
                ratio=Late(ratio),
                unchanged=None if moment.unchanged is None else Late(moment.unchanged),
            )


class _Draws:
    """A lens that sees optimizers draw random numbers inside their update: they round at random."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self.drew: set[int] = set()

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        if self._parameters.updating and operation.name in _DRAWS:
            self.drew.update(self._parameters.running())


def _intent(optimizer: Optimizer) -> str:
    """How an optimizer of the user's own keeps what rounding would lose: "master", "kahan", or "" for not at all."""
    if type(optimizer).__module__.startswith("torch."):
        return ""
    for parameter, state in optimizer.state.items():
        if not isinstance(state, Mapping) or not isinstance(parameter, torch.Tensor):
            continue
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or key in _ORDINARY:
                continue
            return "master" if value.dtype in (torch.float32, torch.float64) else "kahan"
    return ""


def _second_moments(optimizer: Optimizer) -> list[_Moment]:
    """The largest second moments that are kept in half precision."""
    found: list[_Moment] = []
    groups = [(p, g) for g in optimizer.param_groups for p in g["params"] if p in optimizer.state]
    for parameter, group in sorted(groups, key=lambda pair: -pair[0].numel()):
        state = optimizer.state[parameter]
        for key, value in state.items():
            if key not in _SECOND or not isinstance(value, torch.Tensor) or value.dtype not in HALF:
                continue
            beta = _beta(group)
            if beta is None or value.shape != parameter.shape or not value.is_contiguous():
                continue
            coupled = type(optimizer) in (torch.optim.Adam, torch.optim.RMSprop)
            coupled = coupled and not group.get("decoupled_weight_decay", False)
            found.append(
                _Moment(parameter, key, beta, float(group.get("weight_decay", 0.0)) if coupled else 0.0, value)
            )
        if len(found) >= _MOMENTS:
            break
    return found


def _beta(group: dict[str, Any]) -> float | None:
    betas = group.get("betas")
    value = betas[1] if isinstance(betas, (tuple, list)) and len(betas) > 1 else None
    for name in ("beta2", "alpha", "rho"):
        value = group.get(name) if value is None else value
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1 else None


def _pick(tensor: torch.Tensor, step: int) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[::step] if step > 1 else flat
