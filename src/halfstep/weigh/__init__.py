"""What each element of a contribution weighs, read from the autograd graph of its loss.

At backward the graph is walked from the loss down to its element losses, through operations that are linear in
them; the gradient that arrives there is the coefficient of each element, whichever way the script computed it.
Nothing is declared, nothing changes: gradients are bit-identical, no value is read to the host before ``read()``.
"""

from __future__ import annotations

import torch

from halfstep.weigh.site import Site
from halfstep.weigh.term import Term
from halfstep.weigh.walk import Walk

__all__ = ["Term", "Weighing", "weigh"]


class Weighing:
    """The weighing of one contribution: hooks until backward has run, a few 0-dim tensors after it.

    Holds no graph and no node.
    """

    def __init__(self, sites: list[Site], opaque: str | None) -> None:
        self._sites = sites
        self._opaque = opaque

    @property
    def opaque(self) -> str | None:
        """What could not be weighed, or None: the names of the nodes that stopped the walk, or why there was none."""
        reasons = [self._opaque, *(site.failure for site in self._sites)]
        return "; ".join(reason for reason in reasons if reason) or None

    def remove(self) -> None:
        """Take the hooks off. Safe at any time, any number of times."""
        for site in self._sites:
            site.remove()

    def late(self) -> list[torch.Tensor]:
        """The 0-dim tensors that ``read`` needs from the device: for a caller that reads many at once."""
        return [tensor for site in self._sites for tensor in site.late()]

    def read(self, values: list[float] | None = None) -> tuple[Term, ...]:
        """The terms, in the order of the graph, once backward has run; a term no gradient reached is left out.

        ``values`` are the numbers of ``late()`` where the caller has read them already; else they are read here.
        """
        numbers = iter(_host(self.late()) if values is None else values)
        terms = []
        for site in self._sites:
            term = site.term([next(numbers) for _ in site.late()])
            if term is not None:
                terms.append(term)
        return tuple(terms)


def weigh(loss: torch.Tensor, *, budget: int = 64, detail: bool = True) -> Weighing:
    """Prepare to weigh the contribution of ``loss.backward()``: call right before it, ``read()`` after it.

    ``loss`` is the tensor that backward starts from, with every factor on it (``1/A``, the loss scale).
    ``budget`` is the number of nodes the walk may visit. ``detail=False`` leaves out ``spread`` where it would take
    reductions of its own on the device.

    Never raises for a loss it cannot weigh: see ``Weighing.opaque``.
    """
    root = loss.grad_fn
    if root is None:
        return Weighing([], "no grad_fn")
    walk = Walk(root, budget)
    sites = [Site(place, detail) for place in walk.places]
    return Weighing(sites, ", ".join(walk.opaque) or None)


def _host(tensors: list[torch.Tensor]) -> list[float]:
    """Plain numbers of 0-dim tensors: one wait for all that lie on one accelerator."""
    if all(tensor.device.type in ("cpu", "mps") for tensor in tensors):
        return [float(tensor) for tensor in tensors]
    return [float(v) for v in torch.stack([tensor.detach().to(torch.float64) for tensor in tensors]).tolist()]
