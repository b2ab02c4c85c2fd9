"""A comparison as text: the table of modules, the chart of exponents."""

from __future__ import annotations

import math

import torch

from halfstep.probe.micro_batch.comparison import Comparison, ModuleComparison
from halfstep.probe.micro_batch.exponents import LOWEST_SCALE
from halfstep.probe.micro_batch.modules import Difference
from halfstep.probe.table import percent, power, table

_ROWS = 20
_LOW, _HIGH = -48, 18  # powers of two that charts show


def shown(found: Comparison) -> str:
    name = found.precision.upper()
    lines = [f"{name} against FP32 on {found.device}, one micro-batch, loss scale {power(found.scale)}"]
    if found.scale != found.asked_scale:
        lines[0] += f" (gradients overflow at {power(found.asked_scale)})"
    lines += ["", f"verdict    {found.verdict}", f"loss       {found.loss:.6g}, in FP32 {found.full_loss:.6g}"]
    if found.gradient is not None:
        apart = found.gradient
        alike = "" if apart.cosine is None else f" apart, cosine {apart.cosine:.6f}"
        lines.append(f"gradient   {percent(apart.error) + alike if alike else 'not finite'}")
    if found.overflow is not None:
        lines.append(f"overflow   {found.overflow}")
    if found.to_blame and (found.parted is not None or found.gradient_parted is not None):
        lines.append(
            f"parts at   {_named(found.parted)} (outputs, first to exceed {percent(found.tolerance)}), "
            f"{_named(found.gradient_parted)} (gradients)"
        )
    if found.underflow is not None:
        lines.append(f"underflow  {found.underflow[0]} loses {percent(found.underflow[1])} of its elements to zero")
    fit = found.fit
    if fit is not None:
        lines.append(
            f"scale      init_scale={power(fit.scale)} fits"
            + (" (give min_scale, too, which ends at 2^-8)" if fit.scale < LOWEST_SCALE else "")
            + f": {fit.doublings} doublings to the first overflow, "
            f"{percent(fit.lost)} of gradient elements lost"
            + ("" if math.isfinite(found.loss) else ", once the overflow of the forward is cured")
        )
    lines += [f"note       {note}" for note in found.notes]
    rows = [_row(m) for m in found.modules[:_ROWS]]
    head = ("module", "type", "dtype", "output", "cosine", "gradient", "cosine", "weights", "lost", "subnormal")
    lines += ["", table(head, rows, left=3)]
    if len(found.modules) > _ROWS:
        lines.append(f"and {len(found.modules) - _ROWS} modules with smaller errors")
    return "\n".join(lines)


def _row(m: ModuleComparison) -> tuple[str, ...]:
    return (
        m.name or "(the model)",
        m.kind,
        m.dtype,
        percent(m.output.error if m.output else None),
        _cosine(m.output),
        percent(m.gradient.error if m.gradient else None),
        _cosine(m.gradient),
        percent(m.weights.error if m.weights else None),
        percent(m.lost),
        percent(m.subnormal),
    )


def _cosine(apart: Difference | None) -> str:
    return "-" if apart is None or apart.cosine is None else f"{apart.cosine:.4f}"


def _named(name: str | None) -> str:
    return "nowhere" if name is None else name or "the model itself"


def chart(found: Comparison) -> str:
    dtype = torch.float16 if found.precision == "fp16" else torch.bfloat16
    info = torch.finfo(dtype)
    marks = [" "] * ((_HIGH - _LOW) // 2)
    for at in (math.log2(info.smallest_normal * info.eps), math.log2(info.smallest_normal), math.log2(info.max)):
        if _LOW <= at < _HIGH:
            marks[(round(at) - _LOW) // 2] = "|"
    rows = []
    for m in sorted(found.modules, key=lambda m: m.name):
        rows.append((m.name or "(the model)", "output", m.output_exponents.bars(_LOW, _HIGH)))
        if m.gradient_exponents.kept:
            rows.append(("", "gradient", m.gradient_exponents.bars(_LOW, _HIGH)))
            if found.scale != 1.0:
                raised = m.gradient_exponents.bars(
                    _LOW - int(math.log2(found.scale)), _HIGH - int(math.log2(found.scale))
                )
                rows.append(("", f"× {power(found.scale)}", raised))
    axis = f"2^{_LOW}".ljust(len(marks) - 4) + f"2^{_HIGH}"
    return table(("log2 |x|", "", axis), [("", found.precision, "".join(marks)), *rows], left=3)
