"""The walk from a loss down to its element losses, through operations that are linear in them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

Node = Any  # torch.autograd.graph.Node: its per-operation attributes are not typed


def _names(bases: str) -> dict[str, str]:
    return {f"{base}Backward{digit}": base for base in bases.split() for digit in range(3)}


LOSSES = {
    "NllLossBackward0": "nll",
    "NllLoss2DBackward0": "nll",
    "MseLossBackward0": "mse",
    "SmoothL1LossBackward0": "smooth_l1",
    "HuberLossBackward0": "huber",
    "SoftMarginLossBackward0": "soft_margin",
    "BinaryCrossEntropyBackward0": "bce",
    "BinaryCrossEntropyWithLogitsBackward0": "bce_with_logits",
    "MultiMarginLossBackward0": "multi_margin",
    "MultilabelMarginLossBackward0": "multilabel_margin",
    "CtcLossBackward0": "ctc",
    "CtcLossBackward1": "ctc",
    "CudnnCtcLossBackward0": "ctc",
    "CudnnCtcLossBackward1": "ctc",
}
"""Nodes that hold targets: the element losses torch itself knows."""

LOG_SOFTMAX = "LogSoftmaxBackward0"
CTC = {name for name, loss in LOSSES.items() if loss == "ctc"}
# Same elements, same coefficient (up to its sign), in another shape or dtype.
SHAPES = _names("View UnsafeView ReshapeAlias Squeeze Unsqueeze Permute Transpose T ToCopy Clone Alias Neg")
ADDS = _names("Add Sub Rsub")
SCALES = _names("Mul Div")
SUMS = {"SumBackward0", "MeanBackward0"}  # over everything
SUMS_DIM = {"SumBackward1", "MeanBackward1"}  # over some dimensions
# Some of the elements, or all of them with a factor each; a coefficient of 0 where one is left out.
SELECTIONS = _names(
    "Select Slice Index IndexSelect MaskedSelect Gather Take Diagonal Split SplitWithSizes UnsafeSplit Unbind "
    "MaskedFill Expand Topk Sort NanToNum"
)
JOINS = _names("Stack Cat Where")
DOTS = _names("Dot Vdot Bmm")
LINEAR = {**SHAPES, **ADDS, **SCALES, **SELECTIONS, **JOINS, **DOTS} | dict.fromkeys(SUMS | SUMS_DIM, "Sum")
UNARY = _names("Pow Abs Exp LinalgVectorNorm Norm View T ToCopy") | dict.fromkeys(SUMS | SUMS_DIM, "Sum")


def name_of(node: Node) -> str:
    """The node's operation, as autograd names it: "MulBackward0"."""
    return type(node).__name__


def shape_of(node: Node, index: int = 0) -> tuple[int, ...]:
    """Shape of the forward result this node stands for: that of the gradient that arrives at it."""
    return tuple(node._input_metadata[index].shape)


def children(node: Node) -> list[tuple[Node, int, int]]:
    """The inputs that carry a gradient: (node, which of its results, which input of this node)."""
    return [(child, index, slot) for slot, (child, index) in enumerate(node.next_functions) if child is not None]


@dataclass(slots=True)
class Place:
    """A place in the graph where the coefficients of one term can be seen. Lives only while hooks are set."""

    node: Node
    index: int
    name: str
    """The term's loss."""
    kind: str
    """"loss" (a node of LOSSES) | "element" | "chosen" (log-probability of a class) | "classes" (summed over all
    classes alike) | "soft" (log-probabilities times a target)."""
    shape: tuple[int, ...]
    """Of the element losses."""
    above: Node = None
    """The full reduction right above whose scalar gradient decides every coefficient, where there is one."""
    share: float = 1.0
    """Coefficient of an element over the gradient that arrives at ``above``."""
    parts: int = 1
    slot: int = 0
    """Of a "soft" place: which of the node's inputs leads to the log-probabilities."""
    classes: int = 1
    """Coefficients of an element over the gradient that arrives (the classes that were summed)."""
    dim: int = 0
    """Of a "soft" place: the dimension of the classes."""
    weighted: bool = False
    """Class weights lie between the sum over classes and the log-probabilities."""
    logits: tuple[Node, int] | None = None
    """What the log-softmax was taken of: places on the same logits may be one term."""


@dataclass(frozen=True, slots=True)
class _Path:
    node: Node
    index: int
    above: Node = None
    share: float = 1.0
    parts: int = 1
    up: _Path | None = None
    slot: int = 0
    minuend: bool = False  # a constant was added below the last reduction: KL's own entropy
    mean: tuple[int, ...] = ()  # shape under the last mean over everything


class Walk:
    """Finds the places of every term of a loss, in graph order, and says what it could not see through."""

    def __init__(self, root: Node, budget: int) -> None:
        self.places: list[Place] = []
        self.opaque: list[str] = []
        self._budget = budget
        self._seen: dict[tuple[Node, int], Place] = {}
        self._paths = [_Path(root, 0)]
        while self._paths:
            if self._budget <= 0:
                self._stop(f"budget of {budget} nodes")
                break
            self._budget -= 1
            self._visit(self._paths.pop())

    def _stop(self, reason: str) -> None:
        if reason not in self.opaque:
            self.opaque.append(reason)

    def _visit(self, path: _Path) -> None:
        node, name = path.node, name_of(path.node)
        if name in LOSSES:
            self._loss(path, name)
        elif name == LOG_SOFTMAX:
            self._log_softmax(path)
        elif name in LINEAR:
            self._linear(path, name)
        elif name == "AccumulateGrad" or _is_penalty(node):
            self._place(path, "penalty", "element")
        elif name == "CopySlices":
            self._push(path, children(node))
        elif not name[-1].isdigit():
            self._stop(name)  # compiled, custom, checkpointed: what is inside is not visible
        else:
            self._element(path, name)

    def _push(self, path: _Path, inputs: list[tuple[Node, int, int]], **changes: Any) -> None:
        keep = {"above": None, "share": 1.0, "parts": path.parts, "minuend": path.minuend, "mean": path.mean} | changes
        for child, index, slot in reversed(inputs):
            self._paths.append(_Path(child, index, up=path, slot=slot, **keep))

    def _linear(self, path: _Path, name: str) -> None:
        node = path.node
        inputs = children(node)
        shape = shape_of(node, path.index)
        if name in SUMS:
            child, index, _ = inputs[0]
            below = shape_of(child, index)
            mean = name == "MeanBackward0"
            share = 1.0 / max(prod(below), 1) if mean else 1.0
            self._push(path, inputs, above=node, share=share, mean=below if mean else ())
        elif name in SUMS_DIM:
            child, index, _ = inputs[0]
            folded = prod(shape_of(child, index)) // max(prod(shape), 1)
            self._push(path, inputs, parts=path.parts * folded if name == "SumBackward1" else path.parts)
        elif name in SHAPES:
            self._push(path, inputs, above=path.above, share=path.share)
        elif name in ADDS:
            self._add(path, inputs, shape)
        elif name in SCALES:
            self._scale(path, name, inputs, shape)
        elif name in DOTS:
            if len(inputs) == 1 and prod(shape) == 1:
                self._push(path, inputs)
            else:
                self._element(path, name)
        elif name in JOINS:
            if len(inputs) == 1 or all(len(shape_of(c, i)) == 0 for c, i, _ in inputs) or self._leads_to_loss(node):
                self._push(path, inputs)
            else:
                self._element(path, name)
        elif name.startswith(("Gather", "Index")) and self._chooses_class(path, shape):
            pass
        else:
            self._push(path, inputs)

    def _add(self, path: _Path, inputs: list[tuple[Node, int, int]], shape: tuple[int, ...]) -> None:
        if len(inputs) > 1 and shape and not self._leads_to_loss(path.node):
            self._element(path, name_of(path.node))
            return
        same = len(inputs) == 1 and shape_of(inputs[0][0], inputs[0][1]) == shape
        minuend = path.minuend or (len(inputs) == 1 and inputs[0][2] == 1)
        above, share = (path.above, path.share) if same else (None, 1.0)
        self._push(path, inputs, above=above, share=share, minuend=minuend)

    def _scale(self, path: _Path, name: str, inputs: list[tuple[Node, int, int]], shape: tuple[int, ...]) -> None:
        if name.startswith("Div"):
            inputs = [entry for entry in inputs if entry[2] == 0] if len(inputs) == 1 else inputs
            if len(inputs) == 1 and shape and name_of(inputs[0][0]) in CTC:
                self._place(path, "ctc", "element")  # each sequence over its own length is the element: torch's mean
                return
        if len(inputs) == 1:
            self._push(path, inputs)
            return
        if len(inputs) == 2 and not shape:
            terms = [entry for entry in inputs if not _is_parameter_only(entry[0])]
            if len(terms) == 1 and (name.startswith("Mul") or terms[0][2] == 0):
                self._push(path, terms)  # a learned factor on a loss
                return
        self._element(path, name)

    def _leads_to_loss(self, node: Node) -> bool:
        """Whether a loss that torch knows is among the elements that are added here."""
        stack, steps = [node], 0
        while stack and steps < self._budget:
            steps += 1
            here = stack.pop()
            name = name_of(here)
            if name in LOSSES or name == LOG_SOFTMAX:
                return True
            inputs = children(here)
            if name in ADDS or name in JOINS or (name in LINEAR and len(inputs) == 1):
                stack.extend(child for child, _, _ in inputs)
        return False

    def _loss(self, path: _Path, name: str) -> None:
        node = path.node
        child, index, _ = children(node)[0]
        shape = shape_of(child, index)
        loss, logits = LOSSES[name], None
        if loss == "nll":
            if name == "NllLoss2DBackward0" and name_of(child) in SHAPES:
                child, index, _ = children(child)[0]
            if name_of(child) == LOG_SOFTMAX:
                loss, logits = "cross_entropy", child.next_functions[0]
            shape = (shape[0], *shape[2:]) if len(shape) > 1 else ()
        elif loss in ("multi_margin", "multilabel_margin"):
            shape = shape[:-1]
        elif loss == "ctc":
            shape = shape_of(node, path.index)
        self._place(path, loss, "loss", shape, logits=logits)

    def _element(self, path: _Path, name: str) -> None:
        shape = shape_of(path.node, path.index)
        if not shape:
            self._stop(name)  # a function of reduced losses: nothing there is an element
            return
        loss = "elementwise"
        if name.startswith("Abs"):
            loss = "l1"
        elif name.startswith("Pow") and getattr(path.node, "_saved_exponent", None) == 2:
            loss = "mse"
        if loss != "elementwise" and name_of(children(path.node)[0][0]) not in ADDS:
            loss = "elementwise"
        self._place(path, loss, "element", shape)

    def _chooses_class(self, path: _Path, shape: tuple[int, ...]) -> bool:
        """A gather or index that takes one class's log-probability at each position."""
        child, index, _ = children(path.node)[0]
        for _ in range(8):
            name = name_of(child)
            if name == LOG_SOFTMAX:
                whole = shape_of(child, index)
                dim = _dim(child, len(whole))
                one = (
                    len(shape) < len(whole) if name_of(path.node).startswith("Index") else shape[dim : dim + 1] == (1,)
                )
                if one:
                    self._place(path, "nll", "chosen", shape, logits=child.next_functions[0])
                return one
            inputs = children(child)
            if len(inputs) != 1 or not (name in SHAPES or name in SELECTIONS):
                return False
            child, index, _ = inputs[0]
        return False

    def _log_softmax(self, path: _Path) -> None:
        node = path.node
        whole = shape_of(node)
        dim = _dim(node, len(whole))
        shape = whole[:dim] + whole[dim + 1 :]
        logits = node.next_functions[0]
        classes = whole[dim]
        up, slot, weighted = path.up, path.slot, False
        if up is not None and up.up is not None and _weighs_classes(up.node, classes):
            up, slot, weighted = up.up, up.slot, True
        if up is None:
            self._place(path, "elementwise", "element", whole)
            return
        if name_of(up.node) in SUMS_DIM and prod(shape_of(up.node)) == prod(shape):
            count = classes if name_of(up.node) == "SumBackward1" else 1
            self._place(up, "cross_entropy", "classes", shape, classes=count, weighted=weighted, logits=logits)
            return
        name = "kl_div" if path.minuend else "cross_entropy"
        count = classes if path.mean and prod(path.mean) == prod(whole) else 1
        self._place(up, name, "soft", shape, classes=count, dim=dim, slot=slot, logits=logits)

    def _place(self, path: _Path, name: str, kind: str, shape: tuple[int, ...] | None = None, **details: Any) -> None:
        key = (path.node, path.index)
        seen = self._seen.get(key)
        if seen is not None:
            if seen.above is not path.above:
                seen.above = None  # reached twice: only the place itself sees both
            return
        place = Place(
            path.node,
            path.index,
            name,
            kind,
            shape_of(path.node, path.index) if shape is None else shape,
            above=path.above,
            share=path.share,
            parts=path.parts,
            **details,
        )
        self._seen[key] = place
        self.places.append(place)


def saved(node: Node, name: str) -> Any:
    """A saved tensor, only where reading it runs nobody's unpack hook (checkpointing would recompute); else None."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None or raw.unpack_hook is not None else raw.data


def _weighs_classes(node: Node, classes: int) -> bool:
    if name_of(node) != "MulBackward0":
        return False
    inputs = children(node)
    other = saved(node, "other" if inputs[0][2] == 0 else "self") if len(inputs) == 1 else None
    return other is not None and other.numel() == classes and prod(shape_of(node)) > classes


def _dim(log_softmax: Node, dims: int) -> int:
    dim: int = log_softmax._saved_dim  # unsigned: -1 arrives as 2^64 - 1
    return dim if dim < 1 << 63 else dim - (1 << 64) + dims


def _is_penalty(node: Node) -> bool:
    """One parameter through functions of one argument: nothing of the data is in it."""
    for _ in range(6):
        name = name_of(node)
        if name == "AccumulateGrad":
            return True
        inputs = children(node)
        square = name == "MulBackward0" and len(inputs) == 2 and inputs[0][0] is inputs[1][0]
        if not (square or (name in UNARY and len(inputs) == 1)):
            return False
        node = inputs[0][0]
    return False


def _is_parameter_only(node: Node, budget: int = 12) -> bool:
    """Everything below is scalars made of parameters: a learned weight of a loss, not a loss."""
    stack = [(node, 0)]
    while stack and budget:
        budget -= 1
        here, index = stack.pop()
        if name_of(here) == "AccumulateGrad":
            continue
        if prod(shape_of(here, index)) != 1 or name_of(here) in LOSSES or name_of(here) in SUMS:
            return False
        stack.extend((child, at) for child, at, _ in children(here))
    return not stack
