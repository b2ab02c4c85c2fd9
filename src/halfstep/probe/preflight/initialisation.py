"""Is the model, as it is initialised, fit for half precision? One micro-batch in FP32, module by module."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.probe.preflight.checklist import Row, not_judged, some
from halfstep.probe.whole import mapped

LIMIT = 65504.0  # FP16 ends here,
SMALLEST = 2.0**-24  # and begins here: half of it rounds to zero
NORMAL = 2.0**-14
ROOM = 16.0  # nearer to the end than this is worth a note: values grow while a model trains
JUMP = 1e3  # from one layer to the next,
DRIFT = 1e4  # over at least `DEEP` layers
DEEP = 4


@dataclass
class Layer:
    """One call of a module without children, in FP32."""

    name: str
    kind: str
    weighted: bool
    """Whether it has a weight matrix of its own, and so a part in the chain of layers."""
    out: tuple[float, float, bool] = (0.0, 0.0, True)
    """(root mean square, largest magnitude, all finite) of its output."""
    gradient: tuple[float, float, bool] | None = None
    """(norm, largest magnitude, all finite) of the loss's gradient there, not scaled."""
    elements: int = 1
    """Of its output: a mean over n elements divides the norm of what comes back through it by √n, and no layer died."""

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind})"


def look(module: nn.Module, loss: Callable[[], Tensor]) -> list[Layer]:
    """One forward and backward of ``loss``: the modules in the order they ran. Leaves gradients behind."""
    layers: list[Layer] = []
    late: list[tuple[Layer, str, Tensor]] = []
    names = {inner: name for name, inner in module.named_modules()}

    def ran(inner: nn.Module, _: Any, output: Any) -> None:
        tensor = _first(output)
        if tensor is None:
            return
        weighted = any(p.dim() > 1 for p in inner.parameters(recurse=False))
        layer = Layer(names[inner].replace("_orig_mod.", ""), type(inner).__name__, weighted)
        layer.elements = tensor.numel()
        layers.append(layer)
        late.append((layer, "out", _measured(tensor.detach(), mean=True)))
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: late.append((layer, "gradient", _measured(gradient, mean=False))))  # type: ignore[no-untyped-call]

    leaves = [inner for inner in module.modules() if not any(True for _ in inner.children())]
    handles = [inner.register_forward_hook(ran) for inner in leaves]
    try:
        with _eager():
            torch.autograd.backward(loss())
    finally:
        for handle in handles:
            handle.remove()
    for layer, what, numbers in late:
        size, largest, finite = numbers.tolist()
        setattr(layer, what, (size, largest, bool(finite)))
    return layers


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled modules run as written, so that their parts are seen."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading the compiler takes seconds
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return made


def _first(output: Any) -> Tensor | None:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel():
            found.append(tensor)
        return tensor

    mapped(output, keep)
    return found[0] if found else None


def _measured(tensor: Tensor, *, mean: bool) -> Tensor:
    values = tensor.detach().float()
    finite = values.isfinite()
    values = torch.where(finite, values, torch.zeros_like(values))
    norm = torch.linalg.vector_norm(values)
    size = norm / math.sqrt(values.numel()) if mean else norm
    return torch.stack([size, values.abs().amax(), finite.all().float()]).cpu()


# --- rows ---


def parameters(module: nn.Module, half: torch.dtype | None) -> Row:
    """Non-finite parameters; under FP16 those that its range does not hold."""
    bad: list[str] = []
    outside: list[str] = []
    near: list[str] = []
    zero: list[str] = []
    lost: list[tuple[str, float]] = []
    largest = (0.0, "")
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        name = name.replace("_orig_mod.", "")
        size = parameter.detach().abs().float()
        if not bool(size.isfinite().all()):
            bad.append(name)
            continue
        top = float(size.amax())
        largest = max(largest, (top, name))
        if top == 0.0 and parameter.dim() > 1:
            zero.append(name)
        if half is torch.float16:
            if top > LIMIT / ROOM:
                (outside if top > LIMIT else near).append(name)
            there = size > 0
            share = float((there & (size <= SMALLEST / 2)).sum() / there.sum().clamp(min=1))
            if share > 0.01:
                lost.append((name, share))
    numbers = {
        "largest": largest[0],
        "largest_in": largest[1],
        "nonfinite": bad,
        "outside": outside,
        "near": near,
        "zero": zero,
    }
    if bad:
        return Row("parameters", "fail", f"not finite: {some(bad)}", "initialise them, or load them again", numbers)
    if outside:
        return Row(
            "parameters",
            "fail",
            f"beyond FP16's {LIMIT:g}: {some(outside)}; the largest, {largest[0]:.4g}, is in {largest[1]}. Cast, they "
            "are infinite",
            'a smaller initialisation, manager.keep_fp32 for their modules, or precision="bf16"',
            numbers,
        )
    gone = [f"{name} ({share:.0%})" for name, share in lost if share > 0.5]
    if gone:
        return Row(
            "parameters",
            "fail",
            f"too small for FP16, zero once they are cast: {some(gone)}",
            'a larger initialisation, manager.keep_fp32 for their modules, or precision="bf16"',
            numbers,
        )
    told = [f"near FP16's end ({LIMIT:g}): {some(near)}"] if near else []
    told += (
        [f"partly zero once cast to FP16: {some([f'{name} ({share:.0%})' for name, share in lost])}"] if lost else []
    )
    told += [f"all zero: {some(zero)}"] if zero else []
    seen = f"finite, the largest {largest[0]:.4g} in {largest[1]}" + "".join(f"; {entry}" for entry in told)
    return Row("parameters", "note" if near or lost else "pass", seen, "", numbers)


def activations(layers: Sequence[Layer], half: torch.dtype | None, scale: float) -> Row:
    """First activations and gradients against the half range, from an FP32 look."""
    if not layers:
        return not_judged("activations", "no module with a tensor output was seen to run")
    top = max(layers, key=lambda layer: layer.out[1])
    seen = f"in FP32 the largest activation is {top.out[1]:.4g}, out of {top}"
    having = [(layer, layer.gradient) for layer in layers if layer.gradient is not None]
    numbers: dict[str, Any] = {"largest": top.out[1], "largest_in": top.name, "loss_scale": scale}
    nonfinite = next((layer for layer in layers if not layer.out[2]), None)
    if nonfinite is not None:
        return Row(
            "activations",
            "fail",
            f"even in FP32 the output of {nonfinite} is not finite",
            "its inputs, or a division, root or logarithm in it: half precision is not to blame",
            numbers,
        )
    spoiled = next((layer for layer, gradient in reversed(having) if not gradient[2]), None)
    if spoiled is not None:
        return Row(
            "activations",
            "fail",
            f"even in FP32 the gradient that arrives at the output of {spoiled} is not finite",
            "a root, logarithm or norm at the edge of its range: add an epsilon inside it",
            numbers,
        )
    if half is not torch.float16:
        return Row("activations", "pass", f"{seen}; {_range(half)}", "", numbers)
    arrived = [(gradient[1] * scale, layer) for layer, gradient in having if gradient[1] > 0.0]
    under = [layer for size, layer in arrived if size <= SMALLEST / 2]
    weak = [layer for size, layer in arrived if SMALLEST / 2 < size < NORMAL]
    if arrived:
        least = min(arrived, key=lambda entry: entry[0])
        numbers |= {"smallest_gradient": least[0] / scale, "smallest_gradient_in": least[1].name}
        seen += f"; with the scale of {scale:g} the gradients' largest elements lie between {least[0]:.2g} and "
        seen += f"{max(arrived, key=lambda entry: entry[0])[0]:.2g}"
    if top.out[1] > LIMIT:
        names = [str(layer) for layer in layers if layer.out[1] > LIMIT]
        return Row(
            "activations",
            "fail",
            f"{seen}: beyond FP16's {LIMIT:g} at {some(names)}",
            f'manager.keep_fp32(model, "{top.name}"), normalisation before it, a smaller initialisation, or '
            'precision="bf16"',
            numbers,
        )
    if under:
        return Row(
            "activations",
            "fail",
            f"{seen}: nothing of them is left in FP16 at {some([str(layer) for layer in under])}",
            "a higher init_scale, if it does not overflow elsewhere; else these layers' gradients vanish (see layers)",
            numbers,
        )
    near = [str(layer) for layer in layers if layer.out[1] > LIMIT / ROOM]
    told = [f"within a factor {ROOM:g} of FP16's end: {some(near)}"] if near else []
    told += [f"only FP16's subnormals are left of the gradients at {some([str(x) for x in weak])}"] if weak else []
    return Row("activations", "note" if told else "pass", "; ".join([seen, *told]), "", numbers)


def _range(half: torch.dtype | None) -> str:
    return "FP32 throughout" if half is None else "BF16 has FP32's range"


def chain(layers: Sequence[Layer], zero: Sequence[str], dead: Sequence[str], unreached: Sequence[str]) -> Row:
    """Successive layers: do activations or gradients die or explode on the way, is anything dead?"""
    numbers: dict[str, Any] = {"dead": list(dead), "zero_at_first": list(zero), "unreached": list(unreached)}
    weighted = [layer for layer in layers if layer.weighted]
    told, faults = [], []
    forwards = [(layer, layer.out[0]) for layer in weighted if layer.out[0] > 0.0]
    backwards = [
        (layer, layer.gradient[0]) for layer in reversed(weighted) if layer.gradient and layer.gradient[0] > 0.0
    ]
    for what, steps in (("activations", forwards), ("gradients", backwards)):
        if len(steps) < 2:
            continue
        numbers[what] = {"first": steps[0][1], "last": steps[-1][1], "layers": len(steps)}
        told.append(f"{what} go from {steps[0][1]:.3g} to {steps[-1][1]:.3g} over {len(steps)} layers")
        faults += _faults(what, steps)
    if dead:
        silent = [str(layer) for layer in layers if layer.out[1] == 0.0]
        why = f" (only zeros come out of {some(silent)})" if silent else ""
        faults.append(f"no gradient but zero, before and after the first update: {some(list(dead))}{why}")
    waking = [name for name in zero if name not in dead and name not in unreached]
    if waking:
        told.append(f"zero gradient at the first update, alive after it: {some(waking)}")
    if unreached:
        told.append(f"the loss does not reach {some(list(unreached))}")
    if faults:
        return Row(
            "layers",
            "fail",
            "; ".join(faults),
            "another initialisation (Kaiming for ReLU, Xavier for tanh), normalisation or a residual path between the "
            "layers; for dead ones a lower learning rate or another activation",
            numbers,
        )
    if not told:
        return not_judged("layers", "fewer than two layers with weights were seen to run")
    return Row("layers", "note" if unreached else "pass", "; ".join(told), "", numbers)


def _faults(what: str, steps: Sequence[tuple[Layer, float]]) -> list[str]:
    size = "root mean square" if what == "activations" else "norm"
    for one, other in itertools.pairwise(steps):
        if not 1 / JUMP < _ratio(what, one, other) < JUMP:
            (before, old), (after, new) = one, other
            return [f"the {size} of {what} goes from {old:.3g} at {before} to {new:.3g} at {after}, the next layer"]
    first, last = steps[0], steps[-1]
    drift = _ratio(what, first, last)
    if len(steps) >= DEEP and not 1 / DRIFT < drift < DRIFT:
        each = (last[1] / first[1]) ** (1 / (len(steps) - 1))
        return [
            f"{what} {'explode' if drift > 1 else 'die'}: their {size} is multiplied by {each:.3g} a layer, from "
            f"{first[1]:.3g} at {first[0]} to {last[1]:.3g} at {last[0]}, {len(steps)} layers on"
        ]
    return []


def _ratio(what: str, one: tuple[Layer, float], other: tuple[Layer, float]) -> float:
    """How much larger the other is; of gradients, what a mean between them may explain is taken away."""
    ratio = other[1] / one[1]
    if what == "activations":
        return ratio
    spread = ratio * math.sqrt(other[0].elements / one[0].elements)
    return min(ratio, spread, key=lambda found: abs(math.log(found)))


# --- memory ---


@contextlib.contextmanager
def kept(module: nn.Module) -> Iterator[Mapping[str, int]]:
    """Counts the bytes a forward keeps for its backward, the model's own tensors apart: ``{"bytes": …}``."""
    own = {
        t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers()) if t.layout == torch.strided
    }
    sizes: dict[int, int] = {}
    total = {"bytes": 0}

    def keep(tensor: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors and the like have no storage
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield total
    total["bytes"] = sum(sizes.values())
