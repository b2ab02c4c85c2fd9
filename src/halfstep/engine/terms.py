"""Several terms, each with a denominator that is known only at the end: each gathers in buffers of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.errors import UnsupportedError


class TermBuffers:
    """Gradients of the terms after the first, kept apart from ``.grad`` until every term's W is known.

    One backward a term and one buffer a parameter and further term: what a loop pays that gives weights as it goes.
    Groups with a weight function know W ahead and pay neither.
    """

    def __init__(self) -> None:
        self._sums: dict[int, dict[Tensor, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def backward(
        self,
        roots: list[Tensor],
        seeds: list[Tensor],
        terms: list[int],
        leaves: list[Tensor],
        only: list[Tensor] | None,
        *,
        retain_graph: bool | None,
        create_graph: bool,
        apart: bool = False,
    ) -> None:
        """Run one backward a term; term 0 adds to ``.grad`` (unless it is kept ``apart``), term j to its buffers."""
        if create_graph:
            raise UnsupportedError(
                "create_graph with several weighted terms whose weights are counted along",
                "give the weights ahead: manager.groups(loader, size, weight=…)",
            )
        for position, (root, seed, term) in enumerate(zip(roots, seeds, terms, strict=True)):
            keep = retain_graph if position + 1 == len(roots) else True
            if term == 0 and not apart:
                torch.autograd.backward(root, seed, keep, inputs=only)
                continue
            sums = self._sums.setdefault(term, {})
            gradients = torch.autograd.grad(root, leaves, seed, retain_graph=keep, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is None:
                    continue
                if leaf in sums:
                    sums[leaf].add_(gradient.detach())
                else:  # a copy: autograd may hand one tensor to two leaves
                    sums[leaf] = torch.empty_like(leaf).copy_(gradient.detach())

    @torch.no_grad()
    def combine(self, parameters: list[Tensor], factors: list[float | Tensor]) -> None:
        """Put the terms of these parameters together: Σ factor_j · sum_j, into ``.grad``."""
        for parameter in parameters:
            total = None if parameter.grad is None else parameter.grad.mul_(factors[0])
            for term, sums in self._sums.items():
                extra = sums.pop(parameter, None)
                if extra is not None:
                    extra = extra.mul_(factors[term])
                    total = extra if total is None else total.add_(extra)
            parameter.grad = total
        self._sums = {term: sums for term, sums in self._sums.items() if sums}

    def clear(self) -> None:
        self._sums.clear()
