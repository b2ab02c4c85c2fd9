"""The nodes of an autograd graph as weighing sees them: which hold losses, which are linear, what may be read."""

from __future__ import annotations

from math import prod
from typing import Any

Node = Any  # torch.autograd.graph.Node: its per-operation attributes are not typed


def _names(bases: str) -> frozenset[str]:
    return frozenset(f"{base}Backward{digit}" for base in bases.split() for digit in range(3))


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
# Same elements, same coefficient (up to its sign), in another shape or dtype.
SHAPES = _names("View UnsafeView ReshapeAlias Squeeze Unsqueeze Permute Transpose T ToCopy Clone Alias Neg")
ADDS = _names("Add Sub Rsub")
PRODUCTS = _names("Mul")
QUOTIENTS = _names("Div")
SUMS = frozenset({"SumBackward0", "SumBackward1"})
MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
REDUCTIONS = SUMS | MEANS
CHOICES = _names("Gather Index IndexSelect Take Diagonal Select")
# Some of the elements, or all of them in other places; a coefficient of 0 where one is left out.
SELECTIONS = CHOICES | _names(
    "Slice MaskedSelect Split SplitWithSizes UnsafeSplit Unbind MaskedFill Expand Repeat Topk Sort NanToNum Nansum "
    "IndexPut IndexAdd IndexCopy Scatter ScatterAdd ConstantPadNd Flip Roll"
)
JOINS = _names("Stack Cat Where") | {"CopySlices"}
DOTS = _names("Dot Vdot Bmm")
_SCALAR_FACTORS = PRODUCTS | QUOTIENTS | _names("ToCopy Neg View Squeeze Clone")
LINEAR = SHAPES | ADDS | PRODUCTS | QUOTIENTS | REDUCTIONS | SELECTIONS | JOINS | DOTS
_UNARY = REDUCTIONS | _names("Pow Abs Exp LinalgVectorNorm Norm View T ToCopy")


def name_of(node: Node) -> str:
    """The node's operation, as autograd names it: "MulBackward0"."""
    return type(node).__name__


def shape_of(node: Node, index: int = 0) -> tuple[int, ...]:
    """Shape of the forward result this node stands for: that of the gradient that arrives at it."""
    return tuple(node._input_metadata[index].shape)


def children(node: Node) -> list[tuple[Node, int, int]]:
    """The inputs that carry a gradient: (node, which of its results, which input of this node)."""
    return [(child, index, slot) for slot, (child, index) in enumerate(node.next_functions) if child is not None]


def saved(node: Node, name: str) -> Any:
    """A saved tensor, only where reading it runs nobody's unpack hook (checkpointing would recompute); else None."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None or raw.unpack_hook is not None else raw.data


def is_hidden(node: Node, name: str) -> bool:
    """The saved tensor lies behind somebody's unpack hook."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return raw is not None and raw.unpack_hook is not None


def constant(node: Node) -> Any:
    """The other operand of a product or quotient with one differentiable input, where it may be read."""
    slot = children(node)[0][2]
    return saved(node, "other" if slot == 0 else "self")


def class_dim(log_softmax: Node, dims: int) -> int:
    """The dimension a log-softmax normalises, counted from the front."""
    dim: int = log_softmax._saved_dim  # unsigned: -1 arrives as 2^64 - 1
    return dim if dim < 1 << 63 else dim - (1 << 64) + dims


def origin(node: Node, index: int) -> tuple[Node, int]:
    """What a tensor is a view or cast of: autocast casts the same logits once for each loss on them."""
    for _ in range(6):
        inputs = children(node) if name_of(node) in SHAPES else []
        if len(inputs) != 1:
            break
        node, index, _ = inputs[0]
    return node, index


def is_penalty(node: Node) -> bool:
    """One parameter through functions of one argument: nothing of the data is in it."""
    for _ in range(6):
        name = name_of(node)
        if name == "AccumulateGrad":
            return True
        inputs = children(node)
        if not (is_square(node, name, inputs) or (name in _UNARY and len(inputs) == 1)):
            return False
        node = inputs[0][0]
    return False


def is_error(node: Node) -> bool:
    """The square or the size of a difference: an element loss that users write by hand."""
    name, inputs = name_of(node), children(node)
    if not inputs or name_of(inputs[0][0]) not in ADDS:
        return False
    return name.startswith("Abs") or is_square(node, name, inputs)


def is_square(node: Node, name: str, inputs: list[tuple[Node, int, int]]) -> bool:
    if name.startswith("Pow"):
        return getattr(node, "_saved_exponent", None) == 2
    return name in PRODUCTS and len(inputs) == 2 and inputs[0][0] is inputs[1][0]


_IN_ORDER = _names("View UnsafeView ReshapeAlias Squeeze Unsqueeze ToCopy")  # elements stay in their order


def input_mask(node: Node) -> Any:
    """What the inputs of an element loss (a node of torch's, a square, a size) were masked with, one value an element.

    A product with constants, or a fill: whether the constants are a mask is for their values to tell.
    """
    name, inputs = name_of(node), children(node)
    if name not in LOSSES and inputs and name_of(inputs[0][0]) in ADDS:
        inputs = children(inputs[0][0])  # of the difference
    for child, index, _ in inputs:
        here, at = child, index
        while name_of(here) in _IN_ORDER and len(children(here)) == 1:
            here, at, _ = children(here)[0]
        mask = None
        if name_of(here) in PRODUCTS and len(children(here)) == 1:
            mask = constant(here)
        elif name_of(here).startswith("MaskedFill"):
            mask = saved(here, "mask")
            mask = None if mask is None else ~mask
        elif name_of(here).startswith("Where") and len(children(here)) == 1:
            mask = saved(here, "condition")
            mask = ~mask if mask is not None and children(here)[0][2] == 1 else mask
        if mask is not None and mask.numel() > 1:
            return mask.detach().expand(shape_of(here, at)).reshape(-1)
    return None


_CLIPS = _names("Minimum Maximum Clamp Neg Add Sub View Squeeze Unsqueeze ToCopy")


def signed_factor(node: Node, budget: int = 12) -> Any:
    """Constants that elements are multiplied with, below clips and signs: advantages, where they have both signs."""
    stack = [node]
    while stack and budget:
        budget -= 1
        here = stack.pop()
        name, inputs = name_of(here), children(here)
        if name in PRODUCTS and len(inputs) == 1:
            other = constant(here)
            if other is not None and other.numel() > 1 and other.is_floating_point():
                return other.detach()
            stack.append(inputs[0][0])
        elif name in _CLIPS:
            stack.extend(child for child, _, _ in inputs)
    return None


def difference(node: Node) -> Any:
    """Prediction less target, of every element of such a loss; None where it may not be read."""
    if name_of(node) not in LOSSES:
        kept = saved(node, "self")
        return None if kept is None else kept.detach().reshape(-1)
    kept, target = saved(node, "self"), saved(node, "target")
    return None if kept is None or target is None else (kept.detach() - target.detach()).reshape(-1)


def is_learned_factor(node: Node, budget: int = 12) -> bool:
    """Scalars made of parameters only: a learned weight of a loss, not a loss."""
    stack = [(node, 0)]
    while stack and budget:
        budget -= 1
        here, index = stack.pop()
        name = name_of(here)
        if name == "AccumulateGrad":
            continue
        if prod(shape_of(here, index)) != 1 or name in LOSSES or name in REDUCTIONS:
            return False
        stack.extend((child, at) for child, at, _ in children(here))
    return not stack


def below_factors(root: Node, budget: int) -> tuple[Node, int]:
    """The first node below the factors on a scalar loss (1/A, the loss scale, a cast), and the budget left there."""
    node = root
    while budget > 0 and name_of(node) in _SCALAR_FACTORS:
        inputs = node.next_functions
        if inputs[0][0] is None or (len(inputs) > 1 and inputs[1][0] is not None):
            break
        node, budget = inputs[0][0], budget - 1
    return node, budget


def is_one_class(choice: Node, shape: tuple[int, ...], log_softmax: Node, *, direct: bool) -> bool:
    """Whether a selection with this result takes one class at each position (and not some of the positions)."""
    whole = shape_of(log_softmax)
    dim = class_dim(log_softmax, len(whole))
    name = name_of(choice)
    if name.startswith("Gather"):
        back = len(whole) - dim
        return len(shape) >= back and shape[-back] == 1
    if name.startswith("Select") and direct:
        return bool(choice._saved_dim == dim)
    return len(shape) < len(whole) and not (shape and shape[-1] == whole[dim])


def class_weights(node: Node, classes: int) -> Any:
    """The factor of a product, where it is one number for each class."""
    if name_of(node) not in PRODUCTS or len(children(node)) != 1:
        return None
    other = constant(node)
    fits = other is not None and other.numel() == classes and prod(shape_of(node)) > classes
    return other.detach() if fits else None


def divisor(node: Node) -> float | None:
    """The number that element losses are divided by; -1 for a tensor of counts, None where it cannot be read."""
    other = constant(node)
    if other is None:
        return None
    if other.dim():
        return -1.0
    return float(other.tolist()) if other.device.type == "cpu" else None
