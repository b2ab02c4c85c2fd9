"""The walk from a loss down to its element losses, through operations that are linear in them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod
from typing import Any

from halfstep.weigh.nodes import (
    ADDS,
    CHOICES,
    DOTS,
    JOINS,
    LINEAR,
    LOG_SOFTMAX,
    LOSSES,
    MEANS,
    PRODUCTS,
    QUOTIENTS,
    REDUCTIONS,
    SELECTIONS,
    SHAPES,
    SUMS,
    Node,
    below_factors,
    children,
    class_dim,
    class_weights,
    constant,
    divisor,
    input_mask,
    is_error,
    is_learned_factor,
    is_one_class,
    is_penalty,
    is_square,
    name_of,
    origin,
    shape_of,
    signed_factor,
)

_Inputs = list[tuple[Node, int, int]]
_ERRORS = ("mse", "smooth_l1", "huber", "bce_with_logits")  # losses that a mask on both inputs takes out


@dataclass(slots=True)
class Place:
    """A place in the graph where the coefficients of one term can be seen. Lives only until its hook is set."""

    node: Node
    index: int
    slot: int
    """Of a "soft" place: which of the node's inputs leads to the log-probabilities."""
    order: tuple[int, ...]
    name: str
    """The term's loss."""
    kind: str
    """"loss" (a node of LOSSES) | "element" | "chosen" (log-probability of one class) | "classes" (of all classes
    alike) | "soft" (log-probabilities times a target) | "factor" (something times constants: which elements it has
    is told by the constants' values)."""
    shape: tuple[int, ...]
    """Of the element losses."""
    above: Node = None
    """The full reduction right above, whose scalar gradient decides every coefficient, where there is one."""
    share: float = 1.0
    """Coefficient of an element over the gradient that arrives at ``above``."""
    empty: bool = False
    """A mean over no element lies above: 0/0."""
    parts: int = 1
    classes: int = 1
    """Coefficient of an element over the gradient that arrives for it (the classes that were summed)."""
    dim: int = 0
    """Of a "soft" place: the dimension of the classes."""
    weight: Any = None
    """Class weights as the script multiplied them in, where they may be read; of a "factor" place, the constants."""
    weighted: bool = False
    """Of a "soft" place: they are in the gradient that is seen there."""
    mask: Any = None
    """What the inputs of the loss were multiplied or filled with, one value an element."""
    signs: Any = None
    """Of a "factor" place: what its elements were multiplied with below it."""
    logits: tuple[Node, int] | None = None
    """What the log-softmax was taken of: places on the same logits may be one term."""


@dataclass(slots=True)
class _Path:
    node: Node
    index: int = 0
    up: _Path | None = None
    slot: int = 0
    order: tuple[int, ...] = ()
    above: Node = None
    share: float = 1.0
    parts: int = 1
    reduced: bool = False  # a reduction lies above: what comes now are elements
    over: float | None = None  # divided by this below the last reduction; -1: by a tensor of counts
    empty: bool = False  # a mean over no element lies above
    entropy: bool = False  # a constant from which this is subtracted, below the last reduction: KL's own
    mean: tuple[int, ...] = ()  # shape under the last mean over everything


class Walk:
    """Finds the places of every term of a loss, in graph order, and says what it could not see through.

    Breadth first, so that a long tail (a penalty over every parameter) does not use up the budget before the other
    addends are seen.
    """

    def __init__(self, root: Node, budget: int, scalar: bool) -> None:
        self.opaque: list[str] = []
        self._places: dict[tuple[Node, int, int], Place] = {}
        self._budget = budget
        if scalar:
            root, self._budget = below_factors(root, budget)
        self._paths = deque([_Path(root)])
        while self._paths:
            if self._budget <= 0:
                self._stop(f"budget of {budget} nodes")
                break
            self._budget -= 1
            self._visit(self._paths.popleft())

    @property
    def places(self) -> list[Place]:
        places = list(self._places.values())
        return places if len(places) < 2 else sorted(places, key=lambda place: place.order)

    def _stop(self, reason: str) -> None:
        if reason not in self.opaque:
            self.opaque.append(reason)

    def _visit(self, path: _Path) -> None:
        name = name_of(path.node)
        if name in LOSSES:
            self._loss(path, name)
        elif name == LOG_SOFTMAX:
            self._log_softmax(path)
        elif name in LINEAR:
            self._linear(path, name)
        elif name == "_DDPSinkBackward":  # hands every output of a parallel model through
            self._push(path, [entry for entry in children(path.node) if entry[2] == path.index])
        elif name == "AccumulateGrad" or name[-1].isdigit():
            self._element(path, name)
        else:
            self._stop(name)  # compiled, custom, checkpointed: what is inside is not visible

    def _push(self, path: _Path, inputs: _Inputs, **changes: Any) -> None:
        keep = {
            "parts": path.parts,
            "reduced": path.reduced,
            "over": path.over,
            "entropy": path.entropy,
            "mean": path.mean,
            "empty": path.empty,
        } | changes
        for child, index, slot in inputs:
            order = path.order if len(inputs) == 1 else (*path.order, slot)
            self._paths.append(_Path(child, index, up=path, slot=slot, order=order, **keep))

    def _linear(self, path: _Path, name: str) -> None:
        inputs = children(path.node)
        if not inputs:
            return
        if name in SHAPES:
            self._push(path, inputs, above=path.above, share=path.share)
        elif name in REDUCTIONS:
            self._reduction(path, name, inputs)
        elif name in ADDS:
            self._add(path, inputs)
        elif name in PRODUCTS or name in QUOTIENTS:
            self._scale(path, name, inputs)
        elif name in DOTS:
            one = len(inputs) == 1 and prod(shape_of(path.node)) == 1
            self._push(path, inputs, reduced=True) if one else self._element(path, name)
        elif name in JOINS:
            self._join(path, name, inputs)
        elif not (name in CHOICES and self._chooses_class(path, inputs)):
            self._push(path, inputs)

    def _reduction(self, path: _Path, name: str, inputs: _Inputs) -> None:
        child, index, _ = inputs[0]
        below, size = shape_of(child, index), prod(shape_of(path.node))
        folded = prod(below) // max(size, 1)
        parts = path.parts
        if name in SUMS and path.reduced and not (path.over is not None and path.over in (folded, -1.0)):
            parts *= max(folded, 1)
        mean = name in MEANS
        changes: dict[str, Any] = {"parts": parts, "reduced": True, "over": None, "entropy": False}
        if mean and not prod(below):
            changes["empty"] = True
        if size == 1:
            share = 1 / max(folded, 1) if mean else 1.0
            changes |= {"above": path.node, "share": share, "mean": below if mean else ()}
        self._push(path, inputs, **changes)

    def _add(self, path: _Path, inputs: _Inputs) -> None:
        shape = shape_of(path.node)
        if len(inputs) > 1 and shape and not self._leads_to_loss(path.node):
            self._element(path, name_of(path.node))
            return
        child, index, slot = inputs[0]
        single = len(inputs) == 1
        same = single and shape_of(child, index) == shape
        above, share = (path.above, path.share) if same else (None, 1.0)
        self._push(path, inputs, above=above, share=share, entropy=path.entropy or (single and slot == 1))

    def _scale(self, path: _Path, name: str, inputs: _Inputs) -> None:
        shape = shape_of(path.node)
        child, index, slot = inputs[0]
        if len(inputs) == 2:
            terms = [] if shape else [entry for entry in inputs if not is_learned_factor(entry[0])]
            if len(terms) == 1 and (name in PRODUCTS or terms[0][2] == 0):
                self._push(path, terms)
            else:
                self._element(path, name)
        elif name in QUOTIENTS and slot == 1:
            self._element(path, name)
        elif not shape:
            self._push(path, inputs)
        elif name in QUOTIENTS and LOSSES.get(name_of(child)) == "ctc":
            self._place(path, "ctc", "element", shape)  # each sequence over its own length: torch's own mean
        elif name_of(child) == "AccumulateGrad" or (
            prod(shape_of(child, index)) < prod(shape) and not self._leads_to_loss(child)
        ):
            self._element(path, name)  # a parameter on data: the product is the model's, its elements are the loss's
        elif name in PRODUCTS and self._is_doubtful(path, child):
            mask = constant(path.node).detach()
            self._place(path, "elementwise", "factor", shape, weight=mask, signs=signed_factor(child))
        else:
            self._push(path, inputs, over=divisor(path.node) if name in QUOTIENTS else path.over)

    def _join(self, path: _Path, name: str, inputs: _Inputs) -> None:
        base = 0 if name == "CopySlices" else -1  # losses written one by one into a tensor
        scalars = all(slot == base or not shape_of(child, index) for child, index, slot in inputs)
        if scalars or len(inputs) == 1 or self._leads_to_loss(path.node):
            self._push(path, inputs)
        elif name == "CopySlices":
            self._stop(name)
        else:
            self._element(path, name)

    def _is_doubtful(self, path: _Path, child: Node) -> bool:
        """A product with many constants, of something that is no loss by its name: a mask, or the model's own data?"""
        other = constant(path.node)
        return other is not None and other.numel() > 1 and not self._leads_to_loss(child, errors=True)

    def _leads_to_loss(self, node: Node, *, errors: bool = False) -> bool:
        """Whether a loss that torch knows (``errors``: or a squared or absolute difference) is added or joined here."""
        stack, visits = [node], 0
        while stack and visits < self._budget:
            visits += 1
            here = stack.pop()
            name = name_of(here)
            if name in LOSSES or name == LOG_SOFTMAX or (errors and is_error(here)):
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
            child, index = origin(child, index)
            if name_of(child) == LOG_SOFTMAX:
                loss, logits = "cross_entropy", origin(*child.next_functions[0])
            shape = (shape[0], *shape[2:]) if len(shape) > 1 else ()
        elif loss in ("multi_margin", "multilabel_margin"):
            shape = shape[:-1]
        elif loss == "ctc":
            shape = shape_of(node, path.index)
        mask = input_mask(node) if loss in _ERRORS else None
        self._place(path, loss, "loss", shape, logits=logits, mask=mask)

    def _element(self, path: _Path, name: str) -> None:
        shape = shape_of(path.node, path.index)
        if is_penalty(path.node):
            self._place(path, "penalty", "element", shape)
            return
        if not shape:
            self._stop(name)  # a function of reduced losses: nothing there is an element
            return
        loss, mask = "elementwise", None
        if is_error(path.node):
            loss = "l1" if name.startswith("Abs") else "mse"
        if name.startswith("Abs") or is_square(path.node, name, children(path.node)):
            mask = input_mask(path.node)
        self._place(path, loss, "element", shape, mask=mask)

    def _chooses_class(self, path: _Path, inputs: _Inputs) -> bool:
        """A gather or index that takes one class's log-probability at each position."""
        shape = shape_of(path.node)
        chain = [(path.node, shape)]
        child, index, _ = inputs[0]
        while name_of(child) != LOG_SOFTMAX:
            name, inputs = name_of(child), children(child)
            if len(inputs) != 1 or not (name in SHAPES or name in SELECTIONS) or len(chain) > 8:
                return False
            chain.append((child, shape_of(child, index)))
            child, index, _ = inputs[0]
        last = chain[-1][0]
        chooses = [
            node
            for node, size in chain
            if name_of(node) in CHOICES and is_one_class(node, size, child, direct=node is last)
        ]
        if not chooses or chooses[-1] is not path.node:  # a lower one does: this one takes some of its positions
            return False
        self._place(path, "nll", "chosen", shape, logits=origin(*child.next_functions[0]))
        return True

    def _log_softmax(self, path: _Path) -> None:
        node, up, slot = path.node, path.up, path.slot
        whole = shape_of(node)
        dim = class_dim(node, len(whole))
        classes = whole[dim]
        rows = whole[:dim] + whole[dim + 1 :]
        logits = origin(*node.next_functions[0])
        weight = None if up is None else class_weights(up.node, classes)
        below = up is not None and weight is not None
        if up is not None and weight is not None:
            slot, up = up.slot, up.up
        if up is None or not path.reduced:
            self._place(path, "elementwise", "element", whole)
            return
        over = name_of(up.node)
        if over in REDUCTIONS and prod(shape_of(up.node)) == prod(rows):
            count = classes if over in SUMS else 1
            self._place(up, "cross_entropy", "classes", rows, classes=count, weight=weight, logits=logits)
            return
        if over in REDUCTIONS:
            self._place(path, "elementwise", "element", whole)
            return
        higher: _Path | None = up
        while weight is None and higher is not None and name_of(higher.node) not in REDUCTIONS:
            weight, higher = class_weights(higher.node, classes), higher.up
        self._place(
            up,
            "kl_div" if path.entropy else "cross_entropy",
            "soft",
            rows,
            classes=classes if prod(path.mean) == prod(whole) and path.mean else 1,
            dim=dim,
            slot=slot,
            weight=weight,
            weighted=not below,
            parts=path.parts // classes if path.parts % classes == 0 else path.parts,
            logits=logits,
        )

    def _place(self, path: _Path, name: str, kind: str, shape: tuple[int, ...], **details: Any) -> None:
        slot = details.pop("slot", 0)
        key = (path.node, path.index, slot)
        seen = self._places.get(key)
        if seen is not None:
            if seen.above is not path.above:
                seen.above = None  # reached twice: only the place itself sees both
            return
        details.setdefault("parts", path.parts)
        self._places[key] = Place(
            path.node, path.index, slot, path.order, name, kind, shape, path.above, path.share, path.empty, **details
        )
