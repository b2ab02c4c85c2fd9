"""What each element of a contribution weighs, read from the autograd graph of its loss.

At backward the graph is walked from the loss down to its element losses, through operations that are linear in
them; the gradient that arrives there is the coefficient of each element, whichever way the script computed it.
Nothing is declared, nothing changes: gradients are bit-identical, no value is read to the host before ``read()``.
"""

from __future__ import annotations

import torch

from halfstep.weigh.site import Site
from halfstep.weigh.term import Reading, Term, join
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
        readings: list[Reading] = []
        for site in self._sites:
            reading = site.reading([next(numbers) for _ in site.late()])
            if reading is not None:
                readings.append(reading)
        if len(readings) > 1:
            readings = join(readings)
        return tuple(reading.term() for reading in readings)


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
    if hasattr(loss, "placements"):
        return Weighing([], "DTensor loss")  # its numbers are shares: reading them would start a collective
    sites: list[Site] = []
    try:
        walk = Walk(root, budget, not loss.dim())
        groups: dict[object, int] = {}  # places on the same logits
        for place in walk.places:
            group = None if place.logits is None else groups.setdefault(place.logits, len(groups))
            sites.append(Site(place, detail, group))
    except Exception as error:  # an unknown kind of graph is not weighed; the user's backward goes on
        for site in sites:
            site.remove()
        return Weighing([], f"{type(error).__name__} below {type(root).__name__}: {error}")
    return Weighing(sites, ", ".join(walk.opaque) or None)


def _host(tensors: list[torch.Tensor]) -> list[float]:
    """Plain numbers of one-element tensors: one wait for all that lie on one accelerator."""
    numbers = [0.0] * len(tensors)
    far: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.device.type in ("cpu", "mps"):
            numbers[at] = float(tensor)
        else:
            far.setdefault(tensor.device, []).append(at)
    for places in far.values():
        stacked = torch.stack([tensors[at].detach().reshape(()).to(torch.float64) for at in places])
        for at, number in zip(places, stacked.tolist(), strict=True):
            numbers[at] = float(number)
    return numbers
