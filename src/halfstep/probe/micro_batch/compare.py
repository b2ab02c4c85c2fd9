"""One micro-batch both ways: what half precision does to every module's output and gradient, held against FP32."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.engine.precision import Precision
from halfstep.engine.settings import number
from halfstep.errors import MisuseError, PolicyError
from halfstep.probe.micro_batch.comparison import Comparison, ModuleComparison
from halfstep.probe.micro_batch.exponents import DEFAULT_SCALE, LOWEST_SCALE, Exponents, Fit, exponents, fitting_scale
from halfstep.probe.micro_batch.modules import Beside, Difference, Full, Seen, Sums, plain_name
from halfstep.probe.micro_batch.noise import rounding_error
from halfstep.probe.micro_batch.overflow import Look
from halfstep.probe.micro_batch.passes import Pass, Passes
from halfstep.watch.ranges import HALF

_OTHER = 3.0  # no power of two, so that every rounding is another one
_REAL = 0.1
_JUMP = 8.0
_DRAWS = 3.0  # half precision rounds more often than once a module, and one draw may be a small one
_ROUNDINGS = 32  # what a thousand independent roundings of full size add up to: √1000


def explained(dtype: torch.dtype) -> float:
    """How far half precision may be from FP32 by rounding alone, in a network that does not amplify it.

    32 times the dtype's unit roundoff (2⁻¹¹ for FP16, 2⁻⁸ for BF16): what about a thousand independent roundings add
    up to, as a root of their number. 1.6 % for FP16, 12.5 % for BF16. Where a gradient is further off, and no module
    is where the outputs part, what rounding does in this very network is measured:
    :func:`halfstep.probe.micro_batch.noise.rounding_error`; three times that is explained.
    """
    return _ROUNDINGS * torch.finfo(dtype).eps / 2


def compare(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    precision: Literal["auto", "fp16", "bf16"] = "auto",
    loss_scale: float | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Run one micro-batch in half precision and in FP32 and compare every module's output and gradient.

    ``loss_fn(model, batch)`` returns the loss, a scalar; it need not open autocast (where it does, its dtype is
    taken). The half pass runs under autocast with the loss multiplied by ``loss_scale``, by default 2^16 for FP16 and
    1 for BF16; where gradients overflow only because of it, it is lowered until they fit, and both are told.
    The FP32 pass runs with every autocast off, from the same random state. ``precision``: "auto" is what a
    :class:`~halfstep.MixedPrecisionManager` takes on the model's device. ``tolerance``: the relative error up to which
    rounding explains a difference, by default :func:`~halfstep.probe.micro_batch.compare.explained`.

    Modules that were made islands (``manager.keep_fp32``) are islands here too.

    The random state is put back before each pass: torch's, Python's and NumPy's own generators. Where half precision
    differs, FP32 runs once more, and has to repeat itself.

    Nothing changes: parameters, gradients, buffers, modes, attributes that a forward sets, random state and hooks are
    afterwards as before. No hook on a parameter runs; hooks on modules run, since they may be part of what is computed.
    FP32 activations of the micro-batch are held on the host meanwhile.

    Raises :class:`~halfstep.errors.PolicyError` for another precision, no scale or no tolerance, for a model that is
    no module and a ``loss_fn`` that is no function, and :class:`~halfstep.errors.MisuseError` where ``loss_fn`` returns
    no scalar that depends on the model, or in FP32 another one each time.
    """
    if not isinstance(model, nn.Module):
        raise PolicyError(f"the model is of type {type(model).__name__}", "compare(model, loss_fn, batch): a module")
    if not callable(loss_fn):
        raise PolicyError(f"loss_fn is of type {type(loss_fn).__name__}", "a function loss_fn(model, batch)")
    if precision not in ("auto", "fp16", "bf16"):
        raise PolicyError(f"precision={precision!r} is compared with FP32", 'say "auto", "fp16" or "bf16"')
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    chosen = Precision(precision, device)
    asked = DEFAULT_SCALE if chosen.scaled else 1.0
    if loss_scale is not None:
        fix = "a positive, finite number; a power of two changes no digit"
        asked = number("loss_scale", loss_scale, fix)
        if not 0.0 < asked < math.inf:
            raise PolicyError(f"loss_scale={asked} is no loss scale", fix)
    if tolerance is not None:
        fix = "a relative error, such as 0.02, or None for what rounding explains"
        tolerance = number("tolerance", tolerance, fix)
        if not 0.0 <= tolerance < math.inf:
            raise PolicyError(f"tolerance={tolerance} is no distance", fix)
    passes = Passes(model, loss_fn, batch)
    known = run_full(passes)
    found = measure(passes, chosen.name, chosen.region, asked, tolerance, known)
    if found.to_blame is not False or found.rounding is not None or _losses_apart(found):
        dtype = torch.float16 if found.precision == "fp16" else torch.bfloat16
        _require_repetition(passes, known[1], explained(dtype))  # in FP32: not what rounding does here, were it much
    return found


def _losses_apart(found: Comparison) -> bool:
    return abs(found.loss - found.full_loss) > found.tolerance * abs(found.full_loss)


def _require_repetition(passes: Passes, reference: Pass, limit: float) -> None:
    """The same pass again gives the same: where FP32 does not repeat itself, nothing can be said of half precision."""
    again = passes.full()
    losses = reference.loss, again.loss
    if all(map(math.isfinite, losses)):
        apart = abs(losses[1] - losses[0]) > limit * abs(losses[0])
    else:
        apart = math.isfinite(losses[0]) is not math.isfinite(losses[1])
    gradient = None if reference.spoiled or again.spoiled else _joint(again, reference)
    if apart or (gradient is not None and gradient.error > limit):
        seen = f"loss_fn gives another loss each time: {losses[0]:.5g} and {losses[1]:.5g}, both in FP32"
        if not apart and gradient is not None:
            seen = f"loss_fn gives another gradient each time: {gradient.error:.0%} apart, both in FP32"
        raise MisuseError(
            f"{seen} and from the same random state",
            "draw from the generators of torch, Python or NumPy that are put back (torch.rand, random, np.random), "
            "or before compare is called; keep no count from call to call",
        )


def measure(
    passes: Passes,
    name: str,
    region: Callable[[], AbstractContextManager[Any]],
    asked: float,
    tolerance: float | None,
    known: tuple[Full, Pass] | None = None,
) -> Comparison:
    """What :func:`compare` returns, of passes that are prepared already. ``known``: the FP32 pass, where it was run."""
    full, reference = run_full(passes) if known is None else known
    look, beside, half = _looked(passes, region, asked, full)
    first, overflow, underflow = half, look.overflow, look.underflow
    lowest = _lowest_scale(reference, beside, half)
    while half.spoiled and math.isfinite(half.loss) and half.scale > lowest and not reference.spoiled:
        scale = half.scale / 2
        peak = max((m.gradient_exponents.peak for m in beside.modules.values()), default=0.0)
        if overflow is not None and overflow.by_scale_alone and overflow.exact:
            peak = max(peak, overflow.exact / half.scale)
        if peak > 0 and half.dtype in HALF:  # below that, what is inside the modules may still be larger
            scale = min(scale, 2.0 ** math.floor(math.log2(torch.finfo(half.dtype).max / peak)))
        if half.scale <= LOWEST_SCALE:  # wider strides: what is inside the modules may be larger by any factor
            scale = min(scale, half.scale / 8)
        look, beside, half = _looked(passes, region, max(lowest, scale), full)
        overflow = overflow or look.overflow
        underflow = look.underflow
    dtype = half.dtype if half.dtype in HALF else torch.float16 if name == "fp16" else torch.bfloat16
    modules = _modules(passes.model, beside, half, reference)
    parted = _parted(modules, explained(dtype) if tolerance is None else tolerance)
    limit, gradient = tolerance, _joint(half, reference)
    rounding = None
    if limit is None:
        limit = explained(dtype)
        if parted is None and gradient is not None and limit < gradient.error < math.inf:
            rounding = rounding_error(passes, reference, dtype)
            limit = max(limit, _DRAWS * rounding)
    ranked = sorted(modules, key=lambda m: -m.worst)
    return Comparison(
        precision="bf16" if dtype is torch.bfloat16 else "fp16",
        device=str(half.root.device),
        loss=half.loss,
        full_loss=reference.loss,
        scale=half.scale,
        asked_scale=asked,
        tolerance=limit,
        rounding=rounding,
        gradient=gradient,
        spoiled=first.spoiled,
        full_spoiled=reference.spoiled,
        overflow=overflow,
        parted=parted,
        gradient_parted=_gradient_parted(modules, beside.modules, limit),
        modules=tuple(ranked),
        starved=_starved(passes, full, modules, limit),
        fit=_fit(modules, reference, dtype, half, look.peak) if name == "fp16" or dtype is torch.float16 else None,
        underflow=None if underflow is None or not underflow[0] else (underflow[1], underflow[0]),
        notes=_notes(half, modules),
        _passes=passes,
        _region=region,
        _asked_tolerance=tolerance,
    )


def _lowest_scale(reference: Pass, beside: Beside, half: Pass) -> float:
    """Where lowering ends: 2^-8, unless FP32's own gradients would overflow there; then what they need and a bit."""
    if half.dtype not in HALF or reference.spoiled:
        return LOWEST_SCALE
    peak = max((m.gradient_exponents.peak for m in beside.modules.values()), default=0.0)
    peak = max(peak, *(exponents(g).peak for g in reference.gradients.values()))
    if peak == 0.0 or not math.isfinite(peak):
        return LOWEST_SCALE
    needed = math.floor(math.log2(torch.finfo(half.dtype).max / peak))
    return LOWEST_SCALE if 2.0**needed >= LOWEST_SCALE else 2.0 ** max(needed - 12, -126)


def run_full(passes: Passes) -> tuple[Full, Pass]:
    """The FP32 pass that others are held against."""
    full = Full()
    return full, passes.full(full)


def _looked(
    passes: Passes, region: Callable[[], AbstractContextManager[Any]], scale: float, full: Full
) -> tuple[Look, Beside, Pass]:
    look = Look(passes.model)
    beside = Beside(full, scale)
    half = passes.half(region(), scale, look, beside)
    look.judge(half)
    return look, beside, half


def _modules(model: nn.Module, beside: Beside, half: Pass, reference: Pass) -> list[ModuleComparison]:
    """In the order in which their outputs came."""
    out = []
    # Of a compiled module and the one inside it, which share a name, the inner: it comes later.
    named = {plain_name(name): (name, module) for name, module in model.named_modules()}
    for name, seen in sorted(beside.modules.items(), key=lambda entry: entry[1].order):
        prefix, module = named[name]
        own = Sums()
        for parameter, _ in module.named_parameters(recurse=False):
            key = f"{prefix}.{parameter}" if prefix else parameter
            if key in half.gradients and key in reference.gradients:
                own.add(half.gradients[key].float() / half.scale, reference.gradients[key])
        out.append(_module(name, module, seen, own.difference()))
    return out


def _module(name: str, module: nn.Module, seen: Seen, weights: Difference | None) -> ModuleComparison:
    lost = seen.lost
    return ModuleComparison(
        name,
        type(module).__name__,
        seen.order,
        str(seen.dtype).removeprefix("torch."),
        seen.outputs.difference(),
        seen.gradients.difference(),
        weights,
        lost.zero / lost.kept if lost.kept else None,
        lost.subnormal / lost.kept if lost.kept else None,
        math.sqrt(lost.square_zero / lost.square) if lost.square else None,
        seen.output_exponents,
        seen.gradient_exponents,
    )


def _joint(half: Pass, reference: Pass) -> Difference | None:
    sums = Sums()
    for name, gradient in reference.gradients.items():
        twin = half.gradients.get(name)
        sums.add(torch.zeros_like(gradient) if twin is None else twin.float() / half.scale, gradient)
    return sums.difference()


def _parted(modules: list[ModuleComparison], limit: float) -> str | None:
    """The first module whose output is further off than rounding explains, and much further than all before it.

    Errors that grow little by little over many modules are rounding that adds up: no module is where they part.
    """
    before = 0.0
    for module in modules:
        error = 0.0 if module.output is None else module.output.error
        if error > limit and error > _JUMP * before:
            return module.name
        before = max(before, error)
    return None


def _gradient_parted(modules: list[ModuleComparison], seen: dict[str, Seen], limit: float) -> str | None:
    """The first module of the backward beyond the limit; of a module and one inside it, the one inside."""
    apart = [m for m in modules if m.gradient is not None and m.gradient.error > limit]
    # A gradient reaches a container's output and that of its last module at once.
    apart.sort(key=lambda m: (seen[m.name].arrived or 0, -m.name.count(".")))
    return apart[0].name if apart else None


def _starved(passes: Passes, full: Full, modules: list[ModuleComparison], limit: float) -> tuple[str, ...]:
    """The modules that lose more of their gradient's norm to zero than rounding explains, most first.

    Some gradients are zero but for rounding (a bias before a normalisation): FP16 loses them whole, and nothing is
    lost. They are known by another pass in FP32 whose loss is multiplied by 3: what is real comes out the same.
    """
    lost = sorted((m for m in modules if (m.lost_norm or 0.0) > limit), key=lambda m: -(m.lost_norm or 0.0))
    if not lost:
        return ()
    again, apart = Full(), {m.name: Sums() for m in lost}
    passes.full(again, scale=_OTHER)
    for key, gradient in full.gradients.items():
        if key[0] in apart and key in again.gradients:
            apart[key[0]].add(again.gradients[key] / _OTHER, gradient)
    differences = {name: sums.difference() for name, sums in apart.items()}
    return tuple(m.name for m in lost if (d := differences[m.name]) is not None and d.error < _REAL)


def _fit(modules: list[ModuleComparison], reference: Pass, dtype: torch.dtype, half: Pass, peak: float) -> Fit | None:
    """Of the gradients that are held in half precision: those at half outputs, those of the half copies of weights."""
    total = Exponents()
    for module in modules:
        if module.dtype == str(dtype).removeprefix("torch."):
            total += module.gradient_exponents
    if not total.kept and half.dtype in HALF:  # half precision inside modules alone: the copies of weights are known
        for gradient in reference.gradients.values():
            total += exponents(gradient)
    if math.isfinite(peak) and peak > 0:  # the largest one inside modules too
        total = Exponents(total.counts, total.zeros, total.nonfinite, max(total.peak, peak / half.scale))
    elif total.kept:
        largest = max((exponents(g).peak for g in reference.gradients.values()), default=0.0)
        total = Exponents(total.counts, total.zeros, total.nonfinite, max(total.peak, largest))
    return fitting_scale(total, dtype)


def _notes(half: Pass, modules: list[ModuleComparison]) -> tuple[str, ...]:
    notes = []
    if half.dtype not in HALF:
        notes.append("nothing was computed in half precision: autocast is off inside, or every module is an island")
    return tuple(notes)
