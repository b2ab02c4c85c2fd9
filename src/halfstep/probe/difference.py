"""Why an accumulated gradient is not the big batch's: each suspect is taken away and the gradients taken again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.probe.trial import TOLERANCES, Run, Trial, norm
from halfstep.probe.whole import mapped

_SAMPLE = 1_000_000  # gradient elements that the fit looks at; more teach it nothing


@dataclass(frozen=True)
class Cause:
    """One reason, with its numbers: ``name`` is short and fixed, ``seen`` what was tried and found, ``fix`` what helps.

    Names: "means of means", "loss is a sum", "not divided", "divided again", "BatchNorm", "randomness",
    "not repeatable", "examples are mixed", "rounding".
    """

    name: str
    seen: str
    fix: str


def causes_of(trial: Trial, tolerance: float, error: float) -> tuple[Cause, ...]:
    """What makes the accumulated gradient differ; at least one cause. Leaves modules in evaluation mode behind."""
    causes: list[Cause] = []
    apart = _apart(trial.big(), trial.big())
    if apart > 0.1 * tolerance:
        return (_unrepeatable(apart),)
    random = _randomness(trial, tolerance)
    if random is not None:
        causes.append(random)
        if _draws(trial, tolerance):
            return tuple(causes)
    exact = _exact(trial) or trial
    fit = _Fit(exact)
    limit = max(1e-9, TOLERANCES[fit.dtype], 0.01 * error, tolerance if exact is trial else 0.0)
    if fit.residual > limit:
        normal = _batch_norms(exact.model)
        _to_evaluation(normal.values())
        after = _Fit(exact) if normal else fit
        if normal and after.residual < max(limit, 0.5 * fit.residual):
            causes.append(_batch_norm(normal, trial, fit, after))
        if after.residual > limit:
            causes.append(_mixed(after, _batch_norms(exact.model)))
            return tuple(causes)
        fit = after
    weights = fit.weights_cause(limit)
    if weights is not None:
        causes.append(weights)
    if not causes:
        causes.append(_rounding(exact is not trial, fit, error))
    return tuple(causes)


# --- weights: which multiples of the micro-batches' gradients is the big batch's? ---------------------------------


class _Fit:
    """The big batch's gradient as a sum of the micro-batches' own, by least squares: G ≈ Σ c_k g_k."""

    def __init__(self, trial: Trial) -> None:
        self.shares = [share for share in trial.shares if share != 0]
        runs = [trial.alone(k) for k, share in enumerate(trial.shares) if share != 0]
        big = trial.big()
        self.dtype = max((run.dtype for run in [*runs, big]), key=lambda dtype: TOLERANCES[dtype])
        self.counts = [run.supervised for run in runs]
        self.examples = [_leading(trial.batches[k]) for k, share in enumerate(trial.shares) if share != 0]
        target = _flat(big)
        columns = torch.stack([_flat(run) for run in runs], dim=1)
        self._size = [float(columns[:, k].norm()) for k in range(len(runs))]
        total = sum(share * size for share, size in zip(self.shares, self._size, strict=True))
        scaled = columns / torch.tensor([size or 1.0 for size in self._size], dtype=torch.float64)
        solution = torch.linalg.lstsq(scaled, target.unsqueeze(1), driver="gelsd", rcond=1e-9)
        self.unique = int(solution.rank) == len(runs) < len(target)
        found = solution.solution[:, 0]
        self.needed = [float(value) / (size or 1.0) for value, size in zip(found, self._size, strict=True)]
        if not self.unique and self._known_counts():
            counts = [float(count or 0) for count in self.counts]
            self.needed = [count / sum(counts) for count in counts]
        fitted = columns @ torch.tensor(self.needed, dtype=torch.float64)
        self.residual = float((fitted - target).norm()) / total if total else math.inf

    def _known_counts(self) -> bool:
        return None not in self.counts and sum(count or 0 for count in self.counts) > 0

    def weights_cause(self, limit: float) -> Cause | None:
        """The cause that lies in the multiples alone, if they are not what was given."""
        total = sum(share * size for share, size in zip(self.shares, self._size, strict=True))
        gaps = [abs(n - s) * size for n, s, size in zip(self.needed, self.shares, self._size, strict=True)]
        if max(gaps) / total <= limit:
            return None
        given, needed = _numbers(self.shares), _numbers(self.needed)
        told = f"each micro-batch's gradient was multiplied by {given}; the big batch's is made of {needed} of them"
        ratios = [n / s for n, s in zip(self.needed, self.shares, strict=True)]
        even = max(ratios) - min(ratios) <= 1e-3 * abs(max(ratios))
        if all(abs(n - 1) < 1e-3 for n in self.needed):
            return Cause(
                "loss is a sum",
                f"loss_fn adds its elements up: {told}",
                'contributions of a sum are added undivided: reduction="sum", no division by A in the loop; or let '
                "loss_fn return the mean",
            )
        if all(share == 1.0 for share in self.shares) and abs(sum(self.needed) - 1) < 1e-3:
            return Cause("not divided", f"the mean losses of a group were added whole: {told}", _WEIGH)
        if even:
            return Cause(
                "divided again",
                f"the contributions are off by one factor, {ratios[0]:.4g}: {told}",
                "let loss_fn divide by nothing that changes with the batch's size beside its own mean",
            )
        return Cause("means of means", f"{self._elements()}; {told}", _WEIGH)

    def _elements(self) -> str:
        if self._known_counts():
            return f"loss_fn averages over {', '.join(map(str, self.counts))} supervised elements"
        if None not in self.examples and len(set(self.examples)) > 1:
            return f"the micro-batches hold {', '.join(map(str, self.examples))} examples"
        return "loss_fn averages over unequal numbers of elements"


_WEIGH = (
    "weigh each micro-batch by its supervised elements: weight=halfstep.tokens(...) here and in manager.groups, or "
    "divide every sum by the whole group's count (halfstep.weigh shows what a loss divided by)"
)


def _flat(run: Run) -> Tensor:
    """The gradient as one FP64 vector on the CPU, of an even sample of its elements where it is long."""
    elements = sum(gradient.numel() for gradient in run.gradients.values())
    every = max(1, elements // _SAMPLE)
    return torch.cat([gradient.reshape(-1)[::every].double().cpu() for gradient in run.gradients.values()])


def _leading(batch: object) -> int | None:
    sizes: list[int] = []
    mapped(batch, lambda tensor: sizes.append(tensor.shape[0]) or tensor if tensor.dim() else tensor)  # type: ignore[func-returns-value]
    return sizes[0] if sizes else None


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


# --- randomness ---------------------------------------------------------------------------------------------------


def _draws(trial: Trial, tolerance: float) -> bool:
    """Whether the big batch has another gradient when other random numbers are drawn."""
    return _apart(trial.big(), trial.big(another_draw=True)) > 0.1 * tolerance


def _apart(one: Run, other: Run) -> float:
    """‖one − other‖ / ‖one‖."""
    apart = norm({name: one.gradients[name].double() - other.gradients[name].double() for name in one.gradients})
    return apart / (norm(one.gradients) or 1.0)


def _unrepeatable(apart: float) -> Cause:
    return Cause(
        "not repeatable",
        f"one and the same big batch, with the same random numbers, gave gradients {apart:.1e} apart from one call to "
        "the next",
        "let loss_fn depend on its model and batch alone: no counters, caches or generators of its own",
    )


def _randomness(trial: Trial, tolerance: float) -> Cause | None:
    if not _draws(trial, tolerance):
        return None
    droppers = {
        name: module
        for name, module in trial.model.named_modules()
        if module.training and (isinstance(module, nn.modules.dropout._DropoutNd) or _rate(module) > 0)
    }
    _to_evaluation(droppers.values())
    where = f"dropout in {_some(droppers)}" if droppers else "random numbers are drawn by loss_fn or the model"
    return Cause(
        "randomness",
        f"the big batch's own gradient is another one each time: {where}; one big draw is not A small ones",
        "compare with model.eval() (the objective is right if nothing else is named here: only the draw differs)",
    )


def _rate(module: nn.Module) -> float:
    """The rate of modules that drop out inside (attention, LSTM)."""
    rate = getattr(module, "dropout", 0.0)
    return float(rate) if isinstance(rate, int | float) else 0.0


# --- layers and losses that mix examples --------------------------------------------------------------------------


def _batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that normalise by the statistics of the batch they are given."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
    }


def _batch_norm(normal: dict[str, nn.Module], trial: Trial, before: _Fit, after: _Fit) -> Cause:
    sizes = [_leading(batch) for batch in trial.batches]
    return Cause(
        "BatchNorm",
        f"{_some(normal)} normalise by the statistics of {', '.join(map(str, sizes))} examples, in the big batch of "
        f"{_leading(trial.whole)}; however the micro-batches are weighed, their gradients stay {before.residual:.1e} "
        f"off, and {after.residual:.1e} with these layers in evaluation mode",
        "accumulation cannot restore the big batch's statistics: use larger micro-batches, GroupNorm or LayerNorm, or "
        "frozen statistics",
    )


def _mixed(fit: _Fit, statistics: dict[str, nn.Module]) -> Cause:
    why = f" ({_some(statistics)} keep no running statistics: always the batch's)" if statistics else ""
    return Cause(
        "examples are mixed",
        "no weighing of the micro-batches' gradients gives the big batch's (nearest: "
        f"{fit.residual:.1e} off): an example's loss depends on the others beside it{why}",
        "losses over pairs of a batch (contrastive, in-batch negatives) and batch statistics do not split: gather the "
        "features of the whole group first, or accept another objective",
    )


def _to_evaluation(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.training = False


# --- rounding -----------------------------------------------------------------------------------------------------


def _exact(trial: Trial) -> Trial | None:
    """The same trial in FP64, where model and loss allow it."""
    try:
        model = copy.deepcopy(trial.model).double()
        batches = [mapped(batch, _double) for batch in trial.batches]
        twin = Trial(model, trial.loss_fn, batches, mapped(trial.whole, _double), trial.shares)
        run, original = twin.big(), trial.big()
    except Exception:  # whatever a user's model or loss does when everything is FP64
        return None
    near = abs(run.loss - original.loss) <= 0.05 * abs(original.loss) + 1e-3
    return twin if near and norm(run.gradients) > 0 else None


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _rounding(exact: bool, fit: _Fit, error: float) -> Cause:
    agree = "in FP64 they agree to" if exact else "the micro-batches' gradients make it up to"
    return Cause(
        "rounding",
        f"{agree} {fit.residual:.1e}: what remains, {error:.1e}, is rounding and the order of summation",
        "nothing is wrong with the objective; for a loss this ill-conditioned give tolerance=, or compare in FP64",
    )


def _some(modules: dict[str, nn.Module]) -> str:
    names = [f"{name} ({type(module).__name__})" if name else type(module).__name__ for name, module in modules.items()]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
