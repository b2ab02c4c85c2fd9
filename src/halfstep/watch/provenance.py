"""Where values come from: while a look is open, every storage remembers the operator that last wrote it.

An `Origin` keeps the range of what was written, the user's line, the module, and the origins of the inputs, but no
tensor: from the loss or a gradient one can walk back to the operator that made a value. A storage is known by its own
address, held weakly, so that an address that is used again is not taken for its forerunner. Where an output is not
finite its inputs are measured at once, and the operator is computed again in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from halfstep.events import Place
from halfstep.watch.exact import computed, kind_of
from halfstep.watch.gradients import Gradients
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.paths import Paths
from halfstep.watch.ranges import HALF, MEASURED, Held, address, bounds, counted, held, max_, measurable, min_, whole

if TYPE_CHECKING:
    from halfstep.watch.session import Session

ACCUMULATE = "torch::autograd::AccumulateGrad"
_UNWRITTEN = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"))
_SOFTMAX = frozenset(("_softmax", "_log_softmax", "logsumexp"))
_FILLS = frozenset(("fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"))
_KEPT = 20_000  # operators and lines remembered, when no backward comes
_CLOSELY = 256  # operators of one micro-batch whose inputs are measured because their output is not finite
_READS = 4_000  # outputs measured on an accelerator, where each costs a wait; then only in updates 2^k
_LARGE = 65504.0  # the largest number of float16
_COMPARED = 1 << 22  # elements of an operator that is computed again


class Origin:
    """What last wrote a storage: operator, line, module, range; ``inputs``: of what it was made.

    ``bad``: those of its inputs that were not finite, as measured. ``facts``: what else was noted (see the lenses).
    ``low`` and ``high`` are NaN where a value is. ``name`` is "leaf" for what was there before it was looked at,
    "argument" for what entered a root module.
    """

    __slots__ = (
        "at",
        "bad",
        "dtype",
        "facts",
        "grad",
        "high",
        "inputs",
        "key",
        "low",
        "name",
        "node",
        "number",
        "path",
    )

    def __init__(
        self,
        number: int,
        name: str,
        at: Place | None,
        dtype: torch.dtype,
        inputs: tuple[Origin, ...] = (),
        *,
        key: int = 0,
        node: str | None = None,
        path: str | None = None,
        grad: bool = False,
    ) -> None:
        self.number = number
        self.name = name
        self.at = at
        self.dtype = dtype
        self.inputs = inputs
        self.bad: tuple[Origin, ...] = ()
        self.key = key
        self.node = node
        self.path = path
        self.grad = grad
        self.low = 0.0
        self.high = 0.0
        self.facts: dict[str, Any] = {}

    @property
    def finite(self) -> bool:
        return self.low > -math.inf and self.high < math.inf

    @property
    def nan(self) -> bool:
        return self.low != self.low

    @property
    def peak(self) -> float:
        return max(abs(self.low), abs(self.high))

    def upstream(self, depth: int) -> Iterator[Origin]:
        """This origin and those it was made of, nearest first, so many generations up."""
        seen, layer = {id(self)}, [self]
        for _ in range(depth + 1):
            yield from layer
            layer = [o for origin in layer for o in origin.inputs if not (id(o) in seen or seen.add(id(o)))]  # type: ignore[func-returns-value]


class Line(NamedTuple):
    """What is remembered of a forward operator for the gradient operator that bears its number."""

    at: Place | None
    path: str | None
    name: str


class Provenance:
    """The lens. `of` tells a tensor's origin, `now` is the origin of the operator that has just run."""

    def __init__(self, session: Session, paths: Paths, gradients: Gradients) -> None:
        self._session = session
        self._paths = paths
        self._gradients = gradients
        self._origins: dict[int, tuple[Held, Origin]] = {}
        self._lines: dict[int, Line] = {}  # autograd's sequence number -> its forward operator
        self._sequence = 0
        self._number = 0
        self._recent: list[Origin] = []  # since the last cut
        self._former: list[Origin] = []  # between the last two
        self._closely = 0
        self._reads = 0
        self.now: Origin | None = None
        self.received: dict[int, torch.Tensor] = {}  # leaves that this backward gave a gradient, by id
        self.start = 0  # what bears a smaller number was made before the micro-batch before this one

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    # -- asking --------------------------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> Origin | None:
        if tensor.layout is not torch.strided:
            return None  # a sparse gradient has no storage of its own
        known = self._origins.get(address(tensor))
        return None if known is None else known[1]

    def line(self, node: Any) -> Line | None:
        """The forward operator that this autograd node belongs to, where it was looked at."""
        return self._lines.get(node._sequence_nr())

    # -- while looking -------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        self.now = None
        kind = kind_of(operation.func)
        node: Any = torch._C._current_autograd_node()
        if node is not None and node.name() == ACCUMULATE:
            self.received[id(node.variable)] = node.variable
        number = torch.autograd._get_sequence_nr()
        if number != self._sequence:
            self._note_line(operation, node, number)
        if kind.view:
            return
        if kind.listed:
            for tensor in operation.tensors():
                self._origins.pop(address(tensor), None)
            return
        outs = measurable(operation.out)
        if outs:
            self._write(operation, outs, node)

    def _note_line(self, operation: Operation, node: Any, number: int) -> None:
        line = self._lines.get(node._sequence_nr()) if node is not None else None
        line = line or Line(operation.at, self._paths.path(), operation.name)
        for made in range(max(self._sequence, number - 8), number):
            self._lines[made] = line
        self._sequence = number
        while len(self._lines) > _KEPT:
            del self._lines[next(iter(self._lines))]

    def _write(self, operation: Operation, outs: list[torch.Tensor], node: Any) -> None:
        kind = kind_of(operation.func)
        name = kind.name
        keys = [address(t) for t in outs]
        if name in _UNWRITTEN:
            for key in keys:
                self._origins.pop(key, None)
            return
        tensors = [t for t in operation.tensors() if t.dtype in MEASURED and t.layout is torch.strided]
        if not kind.mutable and any(address(t) in keys for t in tensors):
            return  # a view that does not say so
        inputs = []
        for tensor in tensors:
            known = self._origins.get(address(tensor))
            if known is not None and not (
                kind.mutable and name in _FILLS and tensor is operation.args[0] and whole(tensor)
            ):
                inputs.append(known[1])
        self._number += 1
        if len(self._recent) > _KEPT:
            self.cut()
        at, path, label = operation.at, None, None
        if node is not None:
            label = node.name()
            line = self._lines.get(node._sequence_nr())
            if line is not None:
                at, path = at if isinstance(node, FunctionCtx) else line.at, line.path
        else:
            path = self._paths.path()
        origin = Origin(
            self._number, name, at, outs[0].dtype, tuple(inputs), key=keys[0], node=label, path=path,
            grad=node is None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        )  # fmt: skip
        if not outs[0].is_cpu and not self._may_wait():
            return
        ranges = [bounds(t) for t in outs]
        origin.low, origin.high = min_(*(low for low, _ in ranges)), max_(*(high for _, high in ranges))
        self.now = origin
        self._recent.append(origin)
        if self._gradients.busy:
            origin.facts["busy"] = True  # torch's own code at work: an optimizer, a scaler, clipping
        if origin.peak > _LARGE:
            _note_constant(operation, origin)
        if not origin.finite or (name in _SOFTMAX and any(i.low == -math.inf for i in inputs)):
            self._examine(operation, origin, tensors)
        elif kind.mutable and not whole(outs[0]):
            self._join_rest(origin)
        for tensor, key in zip(outs, keys, strict=True):
            self._origins[key] = (held(tensor), origin)

    def _may_wait(self) -> bool:
        self._reads += 1
        number = self._session.look.updates + 1
        return self._reads < _READS or number & (number - 1) == 0 or self._session.look.wanted

    def _join_rest(self, origin: Origin) -> None:
        """A part of a storage was written: what stands in the rest stays."""
        known = self._origins.get(origin.key)
        if known is not None and not known[1].finite:
            origin.low, origin.high, origin.bad = known[1].low, known[1].high, (known[1],)

    # -- what is not finite --------------------------------------------------------------------------------------

    def _examine(self, operation: Operation, origin: Origin, tensors: list[torch.Tensor]) -> None:
        self._closely += 1
        if self._closely > _CLOSELY:
            origin.bad = tuple(i for i in origin.inputs if not i.finite)
            return
        kind = kind_of(operation.func)
        written = {id(t) for t in measurable(operation.out)} if kind.mutable else set()
        peak, bad, largest = 0.0, [], None
        for tensor in tensors:
            known = self._origins.get(address(tensor))
            if id(tensor) in written:  # overwritten by now: what it was is known by its origin
                if known is not None and known[1] in origin.inputs:
                    peak = max(peak, known[1].peak if known[1].finite else 0.0)
                    bad += [] if known[1].finite else [known[1]]
                continue
            low, high = bounds(tensor) if tensor.numel() else (0.0, 0.0)
            if low > -math.inf and high < math.inf:
                if max(abs(low), abs(high)) >= peak:
                    peak, largest = max(abs(low), abs(high)), tensor
                continue
            bad.append(self._known_bad(tensor, known, low, high, operation, origin))
        origin.bad = tuple(bad)
        origin.facts["peak"] = peak
        if kind.name in _SOFTMAX:
            self._look_for_masked(operation, origin)
        if not origin.bad and not origin.finite:
            self._born(operation, origin, largest)

    def _known_bad(
        self, tensor: torch.Tensor, known: Any, low: float, high: float, operation: Operation, origin: Origin
    ) -> Origin:
        if known is not None and not known[1].finite:
            found: Origin = known[1]
            return found
        leaf = Origin(self._number, "leaf", operation.at, tensor.dtype, key=address(tensor), path=origin.path)
        leaf.low, leaf.high = low, high
        leaf.facts.update(counted(tensor))
        if self._gradients.busy:
            leaf.facts["busy"] = True
        if known is None:
            self._origins[leaf.key] = (held(tensor), leaf)
        return leaf

    def _born(self, operation: Operation, origin: Origin, largest: torch.Tensor | None) -> None:
        """Finite inputs gave a non-finite output."""
        scalars = [v for v in (*operation.args, *operation.kwargs.values()) if isinstance(v, float)]
        if any(not math.isfinite(v) for v in scalars):
            origin.facts["meant"] = True
        limit = torch.finfo(origin.dtype).max if origin.dtype in MEASURED else math.inf
        beyond = [v for v in scalars if math.isfinite(v) and abs(v) > limit]
        if beyond:
            origin.facts["constant"] = max(beyond, key=abs)
        elif largest is not None and origin.facts["peak"] > limit:
            entry = self.of(largest)
            if entry is not None and "filled" in entry.facts:
                origin.facts["constant"] = entry.facts["filled"]
            elif largest.dim() == 0 and not largest.requires_grad and entry is None:
                origin.facts["constant"] = bounds(largest)[0]
        if origin.dtype in HALF and sum(t.numel() for t in measurable(operation.out)) <= _COMPARED:
            exact = computed(operation)
            if exact is not None:
                ranges = [bounds(t) for t in measurable(exact)]
                if ranges:
                    origin.facts["exact"] = max_(*(max_(abs(low), abs(high)) for low, high in ranges), 0.0)

    def _look_for_masked(self, operation: Operation, origin: Origin) -> None:
        """Rows of a softmax in which nothing is left."""
        source, dim = operation.args[0], operation.args[1]
        rows = torch.amax(source, dim=dim) == -math.inf
        masked = int(rows.sum().item())
        if masked:
            origin.facts["masked"] = (masked, rows.numel())

    # -- from outside --------------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, at: Place | None, arguments: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A root module is called: which of its arguments are not finite already?"""
        for name, tensor in arguments:
            if tensor.dtype not in MEASURED or not tensor.numel() or tensor.layout is not torch.strided:
                continue
            if not tensor.is_cpu and not self._may_wait():
                continue
            low, high = bounds(tensor)
            if low > -math.inf and high < math.inf:
                continue
            known = self.of(tensor)
            self._number += 1
            origin = Origin(self._number, "argument", at, tensor.dtype, key=address(tensor))
            origin.low, origin.high = low, high
            origin.facts.update(counted(tensor), argument=name, module=type(module).__name__)
            if known is not None:
                origin.inputs = origin.bad = (known,)
            self._recent.append(origin)
            self._origins[origin.key] = (held(tensor), origin)

    def cut(self) -> None:
        """A micro-batch is over: what the one before it left keeps its own origin, not those above it."""
        for key, (reference, _) in list(self._origins.items()):
            if reference.expired():
                del self._origins[key]
        for origin in self._former:
            origin.inputs = origin.bad = ()
        self.start = self._former[-1].number if self._former else self.start
        self._former, self._recent = self._recent, []
        self.received.clear()
        self._closely = 0
        self.now = None


def _note_constant(operation: Operation, origin: Origin) -> None:
    """The largest value written is a number of the script's (a mask's fill), or one handed on."""
    for value in (*operation.args, *operation.kwargs.values()):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _same(abs(value), origin.peak):
            origin.facts["filled"] = float(value)
            return
    for source in origin.inputs:
        if "filled" in source.facts and _same(abs(source.facts["filled"]), origin.peak):
            origin.facts["filled"] = source.facts["filled"]
            return


def _same(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-6)  # a number as it stands, and as FP32 holds it
