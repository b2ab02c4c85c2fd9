"""Remedies for what half precision breaks: each tried by running the micro-batch again, and said whether it helps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.engine import settings
from halfstep.engine.group import examples_of
from halfstep.engine.precision import Precision
from halfstep.errors import HalfstepError, MisuseError, PolicyError
from halfstep.events import plain
from halfstep.probe.micro_batch.compare import measure, run_full
from halfstep.probe.micro_batch.comparison import Comparison
from halfstep.probe.micro_batch.exponents import LOWEST_SCALE
from halfstep.probe.micro_batch.islands import Region, smallest_island
from halfstep.probe.micro_batch.modules import Full
from halfstep.probe.micro_batch.passes import Pass, Passes, unwatched
from halfstep.probe.micro_batch.rates import lower_rate
from halfstep.probe.table import percent, power, table
from halfstep.probe.whole import mapped


@dataclass(frozen=True)
class Remedy:
    """One thing that was tried. ``helps`` is None where it was not, and ``seen`` says why.

    ``seen``: what was measured. ``error``: how far its gradient is from FP32's with the same change. ``line``: the code
    that does it, where it helps.
    """

    name: str
    what: str
    helps: bool | None
    seen: str
    error: float | None = None
    line: str = ""


@dataclass(frozen=True, repr=False)
class Cure:
    """What :meth:`Comparison.cure` tried, in order of preference. ``print`` it; ``line`` is the code to paste."""

    remedies: tuple[Remedy, ...]
    note: str = ""

    def __repr__(self) -> str:
        return f"Cure({', '.join(f'{r.name}: {_HELPS[r.helps]}' for r in self.remedies) or self.note})"

    @property
    def best(self) -> Remedy | None:
        """The first remedy that helps; None where none does, or nothing needs one."""
        return next((remedy for remedy in self.remedies if remedy.helps and remedy.line), None)

    @property
    def line(self) -> str:
        """The code to paste; empty where nothing helps or is needed."""
        return "" if self.best is None else self.best.line

    def as_dict(self) -> dict[str, Any]:
        fields = {"line": self.line, "note": self.note, "remedies": [asdict(r) for r in self.remedies]}
        return cast(dict[str, Any], plain(fields))

    def __str__(self) -> str:
        rows = [(r.name, r.what, _HELPS[r.helps], percent(r.error), r.seen) for r in self.remedies]
        lines = [self.note] if self.note else []
        if rows:
            lines += [table(("remedy", "tried", "helps", "gradient apart", "seen"), rows, left=5)]
        if self.line:
            lines += ["", f"paste      {self.line}"]
        elif rows and not self.note:
            lines += ["", "nothing that was tried helps: train this model in FP32, or write otherwise what is at fault"]
        return "\n".join(lines)


_HELPS = {True: "yes", False: "no", None: "-"}


def cure(
    found: Comparison, optimizer: torch.optim.Optimizer | None, *, updates: int, rate: float, max_norm: float
) -> Cure:
    """See :meth:`Comparison.cure`."""
    with torch.inference_mode(False), torch.enable_grad():
        return _cure(found, optimizer, updates, rate, max_norm)


def _cure(
    found: Comparison, optimizer: torch.optim.Optimizer | None, updates: int, rate: float, max_norm: float
) -> Cure:
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PolicyError(
                f"cure was given an optimizer of type {type(optimizer).__name__}", "the torch.optim.Optimizer itself"
            )
        own = {id(p) for p in found._passes.model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise MisuseError("the optimizer holds no parameter of this model", "the one that updates this model")
    updates = settings.count("updates", updates, "a number of updates, 1 or more")
    rate, norm = settings.number("rate", rate, "a factor, such as 0.1"), settings.norm_of(max_norm)
    if updates < 1 or not 0.0 < rate < math.inf or norm is None:
        raise PolicyError(
            f"updates={updates}, rate={rate}, max_norm={max_norm}", "1 or more updates, a positive rate and norm"
        )
    if not math.isfinite(found.full_loss) or found.full_spoiled:
        return Cure((), "nothing of precision helps: FP32 is not finite either; look at the data, the loss, the rate")
    trial = _Trial(found)
    if found.to_blame is False:
        remedies = [] if optimizer is None else [_rate(trial, optimizer, updates, rate)]
        return Cure(tuple(remedies), "nothing to cure: half precision and FP32 agree on this micro-batch")
    remedies = [_scale(trial)]
    if found.to_blame is None:
        return Cure((*remedies, _clipping(trial, max_norm)), "only the loss scale is too high")
    for attempt in (_island, _region, _bf16, _normalisation, _smaller):
        remedies.append(attempt(trial))
    remedies.append(_rate(trial, optimizer, updates, rate))
    remedies.append(_clipping(trial, max_norm))
    return Cure(tuple(remedies))


class _Trial:
    """What the remedies share: the comparison, its passes, the FP32 pass to hold against, the module at fault."""

    def __init__(self, found: Comparison) -> None:
        self.found = found
        self.passes = found._passes
        self.known: tuple[Full, Pass] = run_full(self.passes)
        self.suspect = found.suspect

    def again(self, passes: Passes | None = None, *, reference: bool = True) -> Comparison:
        """The comparison again, with what was changed. ``reference``: FP32 is not concerned by the change."""
        found, passes = self.found, passes or self.passes
        known = self.known if reference else None
        return measure(passes, found.precision, found._region, found.asked_scale, found._asked_tolerance, known)

    @property
    def module(self) -> nn.Module | None:
        """The module at fault, where it is one inside the model."""
        return self.passes.model.get_submodule(self.suspect) if self.suspect else None


def _judged(name: str, what: str, after: Comparison, line: str, more: str = "") -> Remedy:
    helps = _is_good(after)
    seen = _outcome(after) + (f"; {more}" if more else "")
    error = after.gradient.error if after.gradient is not None else None
    return Remedy(name, what, helps, seen, error, line if helps else "")


def _is_good(after: Comparison) -> bool:
    return after.to_blame is not True and math.isfinite(after.full_loss) and not after.full_spoiled


def _outcome(after: Comparison) -> str:
    if not math.isfinite(after.full_loss) or after.full_spoiled:
        return "FP32 is not finite with it either"
    if after.to_blame is not True:
        at = f" at scale {power(after.scale)}" if after.scale != 1.0 else ""
        return f"loss {after.loss:.5g} (FP32 {after.full_loss:.5g}), all gradients finite{at}"
    if not math.isfinite(after.loss):
        where = f": {after.overflow.operator} in {after.overflow.module or 'the model'}" if after.overflow else ""
        return f"the loss is {after.loss}{where}"
    if after.gradient is not None and after.gradient.spoiled:
        return f"{len(after.spoiled)} gradients are not finite at scale {power(after.scale)} either"
    return f"finite, but the gradients are {percent(after.gradient.error if after.gradient else None)} apart"


# -- one function a remedy -------------------------------------------------------------------------------------------


def _scale(trial: _Trial) -> Remedy:
    found, name = trial.found, "first scale"
    if found.precision != "fp16":
        return Remedy(name, "-", None, "BF16 has the range of FP32: nothing to scale")
    if not math.isfinite(found.loss):
        after = measure(trial.passes, "fp16", found._region, 1.0, found._asked_tolerance, trial.known)
        return _judged(name, "loss_scale=1", after, "", "it was made in the forward, before anything is scaled")
    if found.fit is None:
        return Remedy(name, "-", None, "no gradient in half precision was seen")
    scale = found.fit.scale
    after = measure(trial.passes, "fp16", found._region, scale, found._asked_tolerance, trial.known)
    exponent = int(math.log2(after.scale))
    # The manager refuses a first scale below the one where its scale stops falling.
    floor = f", min_scale=2.0**{max(exponent - 8, -126)}" if after.scale < LOWEST_SCALE else ""
    line = f"MixedPrecisionManager(init_scale=2.0**{exponent}{floor})"
    return _judged(name, f"init_scale={power(after.scale)}", after, line)


def _island(trial: _Trial) -> Remedy:
    name = "island"
    try:
        found = smallest_island(trial.passes.model, trial.found, trial.again)
    except HalfstepError as error:  # half parameters, a scripted module: keep_fp32 says why
        return Remedy(name, trial.suspect or "-", None, error.seen)
    if found is None:
        return Remedy(name, "-", None, "no module inside the model is at fault")
    names, after = found
    quoted = ", ".join(f'"{n}"' for n in names)
    return _judged(name, f"{quoted} in FP32", after, f"manager.keep_fp32(model, {quoted})")


def _region(trial: _Trial) -> Remedy:
    """The operator alone: where it stands in a module that does more, or outside of all."""
    overflow, name = trial.found.overflow, "operator region"
    if overflow is None or overflow.at is None:
        return Remedy(name, "-", None, "no single operator is at fault")
    module = trial.module
    if module is not None and not any(module.children()):
        return Remedy(name, "-", None, "the island is this operator")
    with Region(overflow.at, trial.found.device):
        after = trial.again()
    place = f"{overflow.at.file}:{overflow.at.line}"
    return _judged(
        name,
        f"line {overflow.at.line} in FP32",
        after,
        f"with manager.full_precision():  # around {place}, its half-precision inputs by .float()",
    )


def _bf16(trial: _Trial) -> Remedy:
    if trial.found.precision == "bf16":
        return Remedy("BF16", "-", None, "it is BF16")
    region = Precision("bf16", torch.device(trial.found.device)).region
    after = measure(trial.passes, "bf16", region, 1.0, None, trial.known)
    return _judged("BF16", "BF16 for FP16", after, 'MixedPrecisionManager(precision="bf16")')


def _normalisation(trial: _Trial) -> Remedy:
    module, name = trial.module, "normalisation"
    if module is None:
        return Remedy(name, "-", None, "no module inside the model is at fault")
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    widths: list[int] = []

    def normalised(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor) or args[0].dim() < 2 or not args[0].is_floating_point():
            return args
        x = args[0].float()
        dims = tuple(range(1, x.dim())) if convolution else (-1,)
        widths.append(x.shape[1] if convolution else x.shape[-1])
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return ((x - mean) * torch.rsqrt(variance + 1e-5)).to(args[0].dtype), *args[1:]

    handle = module.register_forward_pre_hook(normalised)
    try:
        after = trial.again(reference=False)
    finally:
        handle.remove()
    if not widths:
        return Remedy(name, "-", None, f"{trial.suspect} takes no tensor to normalise first")
    kind = f"nn.GroupNorm(1, {widths[0]})" if convolution else f"nn.LayerNorm({widths[0]})"
    before, now = trial.found.module(trial.suspect or "").output_exponents, after.module(trial.suspect or "")
    peaks = f"its largest output in FP32 is {now.output_exponents.peak:.3g} in place of {before.peak:.3g}"
    path = expression(trial.suspect or "")
    return _judged(
        name, f"{kind} before {trial.suspect}", after, f"{path} = nn.Sequential({kind}, {path})  # then train so", peaks
    )


def _smaller(trial: _Trial) -> Remedy:
    name, batch = "smaller micro-batch", trial.passes.batch
    count = examples_of(batch) or 0
    if count < 2:
        return Remedy(name, "-", None, "its examples cannot be told apart" if not count else "it is one example")

    def part(low: int, high: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor[low:high] if tensor.dim() and tensor.shape[0] == count else tensor

    middle = count // 2
    outcomes = []
    for low, high in ((0, middle), (middle, count)):
        passes = Passes(trial.passes.model, trial.passes.loss_fn, mapped(batch, part(low, high)))
        try:
            outcomes.append(trial.again(passes, reference=False))
        except Exception as error:  # whatever a user's loss makes of a part of its batch
            return Remedy(name, f"{middle} examples", None, f"loss_fn cannot take a part: {type(error).__name__}")
    worst = max(outcomes, key=lambda o: (not _is_good(o), o.gradient.error if o.gradient else 0.0))
    broken = sum(not _is_good(o) for o in outcomes)
    more = "cut along dimension 0" + (f", {broken} of the 2 halves break" if broken else "")
    line = f"# {middle} examples (dimension 0) a micro-batch, twice as many to a group: manager.groups(loader, 2 * A)"
    return _judged(name, f"{middle} examples for {count}", worst, line, more)


def _rate(trial: _Trial, optimizer: torch.optim.Optimizer | None, updates: int, rate: float) -> Remedy:
    name = "lower learning rate"
    if optimizer is None:
        return Remedy(name, "-", None, "give it the optimizer: cure(optimizer)")
    try:
        tried = lower_rate(trial.passes, optimizer, trial.suspect or None, updates, rate)
    except HalfstepError as failed:
        return Remedy(name, "-", None, failed.seen)
    suspect = tried.name
    as_it_is, after = (trial.again(passes, reference=False) for passes in (tried.at_present, tried.at_lowered))
    seen = (
        f"the largest output of {suspect} in FP32 is {tried.now:.3g} now, after {updates} updates "
        f"{tried.present:.3g} at the present rate, {tried.lowered:.3g} at {rate:g} times it"
    )
    helps: bool | None = _is_good(after) and not _is_good(as_it_is)
    if not _is_good(after):
        seen += f": {_why_not(after)}"
    elif not helps:
        seen += ": half precision can do either"
        helps = None if trial.found.to_blame is False else False
    error = after.gradient.error if after.gradient is not None else None
    path = expression(suspect)
    line = f'{{"params": {path}.parameters(), "lr": {rate:g} * lr}}  # a group of its own in the optimizer'
    return Remedy(name, f"{rate:g} × for {suspect}", helps, seen, error, line if helps else "")


def _why_not(after: Comparison) -> str:
    """What half precision still fails by where the rate was lowered."""
    if not after.finite and after.scale >= after.asked_scale:
        return "too large for half precision at either rate; lower it from before it was"
    if after.starved:
        return "gradients are lost to zero at either rate: it is the loss scale that is too low"
    return "half precision is as far off at either rate"


def _clipping(trial: _Trial, max_norm: float) -> Remedy:
    """Never a cure, and said with what it does to these very gradients."""
    found = trial.found
    half = trial.passes.half(found._region(), found.asked_scale)
    copies = []
    with unwatched():
        for gradient in half.gradients.values():
            copy = torch.empty_like(gradient, dtype=torch.float32, requires_grad=True)
            copy.grad = gradient.detach().float() / half.scale
            copies.append(copy)
        before = _wrong(copies)
        norm = float(torch.nn.utils.clip_grad_norm_(copies, max_norm))
        after = _wrong(copies)
    if before:
        seen = f"the norm is {norm:.3g}: {before:,} elements are not finite before, {after:,} after"
    else:
        seen = f"the norm is {norm:.3g}, all gradients are made smaller alike: what was lost stays lost"
    return Remedy("clipping", f"max_norm={max_norm:g}", False, f"acts after the unscale; {seen}")


def _wrong(copies: list[Tensor]) -> int:
    return sum(int((~torch.isfinite(c.grad)).sum()) for c in copies if c.grad is not None)


def expression(name: str) -> str:
    """How code reaches a module: "blocks.0.mlp" is model.blocks[0].mlp."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in name.split(".") if part)
