"""Where two runs part: what was different from the start, and the first update that rounding does not explain.

The measure. Half precision rounds what it computes, so the gradient of one update is off by at most τ of the sum of
its contributions' norms: 5e-3 in FP16, 3e-2 in BF16 (1e-5 in FP32), halfstep's law of split invariance, measured on
many losses. Over k updates such errors add up like a random walk, so τ·√k is allowed at update k (the statistical
growth of rounding errors: Wilkinson, Rounding Errors in Algebraic Processes, 1963; Higham, Accuracy and Stability of
Numerical Algorithms, 2002, section 2.8): of the FP32 loss (at least a tenth of the first), or of a layer's gradient
norm (at least a tenth of all layers' together). Training that is itself unstable multiplies any rounding error without
such a bound. Where it matters, a further run therefore measures it: FP32 with random errors of τ in every gradient; the
furthest that it has been from FP32 so far, three times, is then what rounding explains of the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from halfstep.probe.runs.pair import Account, Point

TOLERANCES: Mapping[str, float] = {"float16": 5e-3, "bfloat16": 3e-2, "float32": 1e-5}
MEASURE = "τ·√k of the loss, or of a layer's gradient norm, at update k; τ is 5e-3 in FP16, 3e-2 in BF16"
MEASURED = (
    "of the loss, three times as far as FP32 went from itself with random errors of τ in every gradient, at least τ; "
    "of a layer's gradient norm τ·√k at update k; τ is 5e-3 in FP16, 3e-2 in BF16"
)
SURE = 3.0
"""How many times further than by random errors of the same size a run must be for these not to explain it."""
_FLOOR = 0.1
_AHEAD = 5  # updates, this one among them, of which the usual one must be apart too: a spike is no parting
_SAME = 1e-2  # of its norm, that the projection of floating-point data may differ by: inputs cast to BF16

Pair = tuple[Point, Point]


@dataclass(frozen=True, slots=True)
class Parting:
    """The first update that rounding does not explain. ``what``: "loss" or "layer"; ``allowed``: how far apart."""

    update: int
    micro: int
    what: str
    own: float
    fp32: float
    allowed: float
    layer: str | None = None
    optimizer: int | None = None


@dataclass(frozen=True, slots=True)
class LayerBeside:
    """One layer's gradient norm in both runs at one update; ``excess``: their distance by what rounding explains."""

    update: int
    layer: str
    own: float
    fp32: float
    excess: float


@dataclass(frozen=True, slots=True)
class Sameness:
    """From which update on (None: never) the two runs drew other data, other random numbers; whether they began from
    the same parameters (None: not seen)."""

    start: bool | None
    data: int | None
    random: int | None


def pairs(own: Account, fp32: Account) -> list[Pair]:
    """The updates of both that stand at the same place of the data: same optimizer, same number of backwards."""
    known = {(point.optimizer, point.micro): point for point in fp32.points}
    both = ((point, known.get((point.optimizer, point.micro))) for point in own.points)
    return [(point, other) for point, other in both if other is not None]


def precision(own: Account) -> str:
    """The lowest precision that the script computes in; it decides τ."""
    return min((*own.halves, "float32"), key=lambda name: -TOLERANCES[name])


def sameness(matched: Sequence[Pair], half_parameters: bool = False) -> Sameness:
    """What both drew. Whole numbers must be equal, others to a hundredth: a script may cast its inputs."""
    start: bool | None = None
    data: int | None = None
    random: int | None = None
    for own, fp32 in matched:
        if own.weights and fp32.weights:
            near = 2.0**-8 if half_parameters else 1e-6  # weights that are half themselves were rounded
            shared = own.weights.keys() & fp32.weights.keys()
            same = bool(shared) and all(math.isclose(own.weights[n], fp32.weights[n], rel_tol=near) for n in shared)
            start = same if start is None else start and same
        if data is None and own.data is not None and fp32.data is not None and not _alike(own.data, fp32.data):
            data = own.attempted
        if random is None and own.random is not None and fp32.random is not None and own.random != fp32.random:
            random = own.attempted
    return Sameness(start, data, random)


def _alike(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    near = abs(one[1] - other[1]) <= _SAME * max(one[2], other[2], 1e-30)
    unknown = not (math.isfinite(one[1]) and math.isfinite(other[1]))  # inputs that are not finite tell nothing
    return one[0] == other[0] and (near or unknown)


def parting(matched: Sequence[Pair], dtype: str, jittered: Sequence[Pair] = ()) -> Parting | None:
    """The first update at which the losses or a layer's gradient are apart beyond what rounding explains.

    Each optimizer is measured by its own losses and gradients: another's may be of any other size.
    ``jittered``: the updates of a run with random errors and of FP32.
    """
    found = []
    for optimizer in dict.fromkeys(own.optimizer for own, _ in matched):
        of_it = [pair for pair in matched if pair[0].optimizer == optimizer]
        found += [_of_loss(of_it, dtype, jittered), _of_layers(of_it, dtype)]
    return min((p for p in found if p is not None), key=lambda p: p.micro, default=None)


def _of_loss(matched: Sequence[Pair], dtype: str, jittered: Sequence[Pair]) -> Parting | None:
    seen = [(a, b) for a, b in matched if a.loss is not None and b.loss is not None]
    explained = _explained(seen, dtype, jittered)
    ratios = [_ratio(own.loss or 0.0, fp32.loss or 0.0, e) for (own, fp32), e in zip(seen, explained, strict=True)]
    for at, (own, fp32) in enumerate(seen):
        if ratios[at] > 1.0 and median(ratios[at : at + _AHEAD]) > 1.0:
            a, b = own.loss or 0.0, fp32.loss or 0.0
            return Parting(own.attempted, own.micro, "loss", a, b, explained[at], optimizer=own.optimizer)
    return None


def _explained(seen: Sequence[Pair], dtype: str, jittered: Sequence[Pair]) -> list[float]:
    """How far apart rounding may bring the losses, update by update."""
    sizes = [TOLERANCES[dtype] * _loss_scale(seen, fp32) for _, fp32 in seen]
    if not jittered:
        return [size * math.sqrt(number) for number, size in enumerate(sizes, 1)]
    went = {(b.optimizer, b.micro): abs((a.loss or 0.0) - (b.loss or 0.0)) for a, b in jittered}
    furthest, out = 0.0, []
    for (_, fp32), size in zip(seen, sizes, strict=True):
        apart = went.get((fp32.optimizer, fp32.micro), 0.0)
        furthest = max(furthest, apart if math.isfinite(apart) else math.inf)
        out.append(max(size, SURE * furthest))
    return out


def _loss_scale(seen: Sequence[Pair], fp32: Point) -> float:
    first = abs(seen[0][1].loss or 0.0)
    return max(abs(fp32.loss or 0.0), _FLOOR * first if math.isfinite(first) else 0.0, 1e-30)


def _ratio(own: float, fp32: float, explained: float) -> float:
    """Their distance by what rounding explains; 0 where neither is finite."""
    if not math.isfinite(own) or not math.isfinite(fp32):
        return math.inf if math.isfinite(own) != math.isfinite(fp32) else 0.0
    return abs(own - fp32) / explained


def beside(matched: Sequence[Pair], dtype: str) -> Iterator[list[LayerBeside]]:
    """For each sampled update, its layers, those furthest apart first."""
    numbers: Counter[int] = Counter()
    for own, fp32 in matched:
        numbers[own.optimizer] += 1
        finite = [n for n in fp32.layers.values() if math.isfinite(n)]
        total, explained = math.hypot(*finite), TOLERANCES[dtype] * math.sqrt(numbers[own.optimizer])
        layers = []
        for name in own.layers.keys() & fp32.layers.keys():
            a, b = own.layers[name], fp32.layers[name]
            size = max(b if math.isfinite(b) else 0.0, _FLOOR * total, 1e-30)
            layers.append(LayerBeside(own.attempted, name, a, b, _ratio(a, b, explained * size)))
        if layers:
            yield sorted(layers, key=lambda layer: (-layer.excess, layer.layer))


def _of_layers(matched: Sequence[Pair], dtype: str) -> Parting | None:
    sampled = [(pair, layers) for pair, layers in zip(matched, _aligned(matched, dtype), strict=True) if layers]
    for at, ((own, fp32), layers) in enumerate(sampled):
        for worst in layers:
            later = [_of(name, worst.layer) for _, name in sampled[at : at + _AHEAD]]
            if worst.excess > 1.0 and median(later) > 1.0:
                allowed = abs(worst.own - worst.fp32) / worst.excess if math.isfinite(worst.excess) else math.nan
                a, b = worst.own, worst.fp32
                return Parting(own.attempted, fp32.micro, "layer", a, b, allowed, worst.layer, own.optimizer)
    return None


def _aligned(matched: Sequence[Pair], dtype: str) -> list[list[LayerBeside]]:
    rows = beside(matched, dtype)
    return [next(rows) if own.layers.keys() & fp32.layers.keys() else [] for own, fp32 in matched]


def _of(layers: Sequence[LayerBeside], name: str) -> float:
    return next((layer.excess for layer in layers if layer.layer == name), 0.0)
