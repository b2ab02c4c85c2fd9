"""A backward in FP16 beside its twin in FP32: which gradients were lost to rounding, layer by layer.

In some micro-batches that are looked at (the first ones, then 2^k), every gradient operator with an FP16 result is
computed again in FP32; from the first element that FP16 rounded to zero on, the FP32 values are followed down to the
parameters. So what is lost is measured where it is lost, and what it does to a layer where it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import GradientsMeasured, LayerGradient
from halfstep.watch.exact import Shadows, computed, kind_of
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.provenance import ACCUMULATE, Provenance
from halfstep.watch.ranges import measurable

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_FIRST = 3  # contributions measured at the start of a run, then 2^k
_ROOM = 1 << 24
_LARGE = 1 << 22  # elements of one result that is computed again
_WORK = 1 << 28  # multiplications of one product
_FEW = 16  # elements below which a share says nothing
_DEEPEST = -24  # exponent of FP16's smallest number
_NORMAL = -14  # of its smallest normal one
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))


@dataclass(slots=True)
class _Layer:
    elements: int = 0
    kept: int = 0
    lost: int = 0
    subnormal: int = 0
    peak: float = 0.0
    square: float = 0.0
    missing: float = 0.0
    exponents: dict[int, int] = field(default_factory=dict)

    def plain(self, name: str) -> LayerGradient:
        missing = math.sqrt(self.missing / self.square) if self.square > 0.0 else 0.0
        exponents = dict(sorted(self.exponents.items()))
        return LayerGradient(name, self.elements, self.kept, self.lost, self.subnormal, self.peak, missing, exponents)


class Twins:
    def __init__(self, session: Session, provenance: Provenance) -> None:
        self._session = session
        self._provenance = provenance
        self._shadows = Shadows(_ROOM)
        self._layers: dict[int, tuple[torch.Tensor, _Layer]] = {}  # id(parameter) -> it, its gradient
        self._activations: dict[str, _Layer] = {}
        self._worst: tuple[float, str, Any] = (0.0, "", None)
        self._needed = 1.0  # how many times larger the scale must be to keep most of what was lost
        self._count = 0

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    def before(self, operation: Operation) -> None:
        if operation.backward and self._due() and operation.name == "add_":
            node: Any = torch._C._current_autograd_node()
            if node is not None and node.name() == ACCUMULATE:
                self._arrived(node.variable, operation.args[1])

    def after(self, operation: Operation) -> None:
        if not operation.backward or not self._due():
            return
        out = operation.out
        half = isinstance(out, torch.Tensor) and out.dtype is torch.float16
        if isinstance(out, (tuple, list)):
            half = any(isinstance(t, torch.Tensor) and t.dtype is torch.float16 for t in out)
        if not half and not self._shadows and not self._activations:
            return
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        if node.name() == ACCUMULATE:
            if operation.name != "add_" and isinstance(operation.args[0], torch.Tensor):
                self._arrived(node.variable, operation.args[0])
        elif half or any(self._shadows.of(t) is not None for t in operation.tensors()):
            self._compute(operation, node)

    def _due(self) -> bool:
        number = self._session.stream.micro
        return number <= _FIRST or number & (number - 1) == 0

    # -- operators -----------------------------------------------------------------------------------------------

    def _compute(self, operation: Operation, node: Any) -> None:
        outs = measurable(operation.out)
        if not outs or sum(t.numel() for t in outs) > _LARGE or _work(operation) > _WORK:
            return
        exact = computed(operation, self._shadows)
        if exact is None:
            return
        followed = any(self._shadows.of(t) is not None for t in operation.tensors())
        view = kind_of(operation.func).view
        for out, twin in zip(outs, measurable(exact), strict=False):
            if out.shape != twin.shape:
                return
            half = out.dtype is torch.float16 and not view
            lost = _lost(out, twin) if half or followed else 0
            if half:
                self._note(operation, node, out, twin, lost)
            if followed or lost:
                self._shadows.keep(out, twin)
        self._count += 1
        if self._count % 64 == 0:
            self._shadows.prune()

    def _note(self, operation: Operation, node: Any, out: torch.Tensor, twin: torch.Tensor, lost: int) -> None:
        line = self._provenance.line(node)
        name = (line.path if line is not None else None) or "(outside modules)"
        layer = self._activations.setdefault(name, _Layer())
        kept = _measure(layer, out, twin, lost)
        exponents = torch.frexp(out.float())[1][(out != 0) & torch.isfinite(out)] - 1 - _DEEPEST
        if exponents.numel():
            for exponent, count in enumerate(torch.bincount(exponents.clamp(0, 63), minlength=1).tolist(), _DEEPEST):
                if count:
                    layer.exponents[exponent] = layer.exponents.get(exponent, 0) + count
        if kept < _FEW or not lost:
            return
        if lost / kept > self._worst[0]:
            self._worst = (lost / kept, f"{operation.name} in {node.name()}", line)
        if lost > kept // 8:
            size = float(twin[(out == 0) & (twin != 0)].double().square().mean().sqrt())
            self._needed = max(self._needed, 4 * 2.0**_DEEPEST / size) if size > 0.0 else math.inf

    # -- parameters ----------------------------------------------------------------------------------------------

    def _arrived(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if not isinstance(gradient, torch.Tensor) or gradient.layout is not torch.strided or not gradient.numel():
            return
        twin = self._shadows.of(gradient)
        known = self._layers.get(id(parameter))
        if known is None:
            known = self._layers[id(parameter)] = (parameter, _Layer())
        exact = gradient if twin is None else twin
        _measure(known[1], gradient, exact, 0 if twin is None else _lost(gradient, twin))

    def tell(self, scale: torch.Tensor | None, names: Mapping[int, str]) -> None:
        """After a backward: what each layer lost. ``names``: of parameters, by their id."""
        peaks = [a.peak for a in self._activations.values()]
        if peaks and self._due() and all(map(math.isfinite, peaks)):
            line, peak = self._worst[2], max(peaks)
            number = None if scale is None else float(scale)
            limit = torch.finfo(torch.float16).max / 2
            fitting = 2.0 ** math.floor(math.log2(limit / (peak / (number or 1.0)))) if peak > 0.0 else None
            self._session.stream.emit(
                GradientsMeasured,
                at=self._session.place(),
                scale=number,
                layers=tuple(_plain((names.get(key, "?"), layer) for key, (_, layer) in self._layers.items())),
                activations=tuple(_plain(self._activations.items())),
                worst_by=self._worst[1] or None,
                worst_at=None if line is None else line.at,
                worst_module=None if line is None else line.path,
                fitting=fitting,
                needed=self._needed,
            )
        self.clear()

    def clear(self) -> None:
        self._shadows.clear()
        self._layers.clear()
        self._activations.clear()
        self._worst = (0.0, "", None)
        self._needed = 1.0


def _plain(layers: Iterable[tuple[str, _Layer]]) -> list[LayerGradient]:
    return [layer.plain(name) for name, layer in layers]


def _measure(layer: _Layer, out: torch.Tensor, twin: torch.Tensor, lost: int) -> int:
    """Add one gradient to a layer's account; how many elements FP32 keeps."""
    wide, size = twin.float(), out.float().abs()
    kept = int((wide != 0).sum())
    layer.elements += out.numel()
    layer.kept += kept
    layer.lost += lost
    if out.dtype is torch.float16:
        layer.subnormal += int(((size > 0) & (size < 2.0**_NORMAL)).sum())
    peak = float(size.amax())
    layer.peak = peak if not peak <= layer.peak else layer.peak  # NaN stays
    layer.square += float(wide.double().square().sum())
    if twin is not out:
        layer.missing += float((wide.double() - out.double()).square().sum())
    return kept


def _lost(out: torch.Tensor, twin: torch.Tensor) -> int:
    return int(((out == 0) & (twin != 0)).sum())


def _work(operation: Operation) -> int:
    """Multiplications of a product of matrices."""
    if kind_of(operation.func).name not in _PRODUCTS:
        return 0
    a, b = [v for v in operation.args if isinstance(v, torch.Tensor)][-2:]
    return a.numel() * int(b.shape[-1])
