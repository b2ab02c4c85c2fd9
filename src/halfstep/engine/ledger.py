"""What waits in the gradients: the contributions not yet stepped, and the denominators they still have to get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep.engine.late import host
from halfstep.errors import MisuseError, WeightError, counted

Mode = Literal["plain", "ahead", "along"]
"""How contributions are normalised. "plain": as the caller scaled them. "ahead": W was known before backward, nothing
is left to divide. "along": w / ref went into each backward, ref / W is applied at the end."""

Weight = float | Tensor
"""A tensor where the number is still on the device."""


@dataclass(slots=True)
class Contribution:
    """What one backward added. One entry a term in ``losses``, ``factors`` and ``weights``.

    ``factors`` are the loss scale apart; Σ factors·losses, divided by what is left to divide, is the update's loss.
    """

    mode: Mode
    source: str
    """Where its weights came from, as words for the record."""
    losses: tuple[float | Tensor, ...]
    factors: tuple[Weight, ...]
    weights: tuple[Weight, ...] | None
    examples: int | None = None
    micro_batch: int = 0
    empty: bool = False
    only: frozenset[int] | None = None
    """ids of the parameters it was kept to by ``inputs=``."""
    leaves: frozenset[int] | None = None
    """ids of the parameters its graph reaches, where that was looked at."""
    terms: tuple[Any, ...] = ()
    """What weighing found, on the updates that are weighed."""
    opaque: str | None = None
    filler: bool = False
    """Whether its micro-batch only kept this replica in the company of others."""

    def reaches(self, parameters: frozenset[int] | set[int]) -> bool:
        """Whether it may have added to any of these parameters."""
        known = self.only if self.only is not None else self.leaves
        return known is None or not known.isdisjoint(parameters)


@dataclass(slots=True)
class Share:
    """The pending contributions one optimizer (or several, together) is about to use."""

    contributions: list[Contribution]
    mode: Mode
    weights: tuple[Weight, ...] | None
    """W of each term; None where contributions have no weights. Of this replica where they are counted along."""

    def __len__(self) -> int:
        return len(self.contributions)

    @property
    def micro_batches(self) -> int:
        if len(self.contributions) == 1:
            return int(not self.contributions[0].filler)
        return len({c.micro_batch for c in self.contributions if not c.filler})

    @property
    def examples(self) -> int | None:
        seen: dict[int, int | None] = {c.micro_batch: c.examples for c in self.contributions}
        counts = list(seen.values())
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)

    @property
    def empty(self) -> bool:
        """Whether nothing at all is supervised, as far as the host knows."""
        return all(c.empty for c in self.contributions)

    def loss(self, reference: Weight, weights: tuple[Weight, ...] | None) -> float | Tensor:
        """Σ S / W over these contributions; as the caller scaled them where there are no weights.

        ``reference`` and ``weights`` (W of each term) divide what was counted along.
        """
        total: float | Tensor = 0.0
        along = self.mode == "along" and weights is not None
        for contribution in self.contributions:
            if contribution.empty:
                continue
            for term, (loss, factor) in enumerate(zip(contribution.losses, contribution.factors, strict=True)):
                if isinstance(factor, float) and factor == 0.0:
                    continue
                share = loss * factor
                if isinstance(factor, Tensor):  # a weight of 0 whose loss is NaN
                    share = torch.where(factor == 0.0, torch.zeros_like(factor), share)
                total = total + (share * (reference / weights[term]) if along and weights is not None else share)
        return total


@dataclass(slots=True)
class Ledger:
    """The pending contributions of a manager."""

    pending: list[Contribution] = field(default_factory=list)
    reference: Weight = 1.0
    """``ref``: weights that are counted along enter backward as w / ref. Of a group: what W is if all weigh the same,
    so that w / ref is the plain loop's 1 / A and nothing is left to divide. Of a flat loop, whose length is not known:
    a power of two near its first weight, which costs no rounding."""
    number: int = 0
    """Contributions made outside groups so far: each counts as a micro-batch of its own."""
    anchored: bool = False
    """Whether ``ref`` is already that of the group whose contributions are pending."""

    def admit(self, mode: Mode, terms: int, only: frozenset[int] | None) -> None:
        """Refuse a contribution that does not go with those pending on the same parameters. Changes nothing."""
        first = next((c for c in self.pending if only is None or c.reaches(only)), None)
        if first is None:
            return
        if first.mode != mode:
            words = {"plain": "without a weight", "along": "with a weight", "ahead": "weighted by its group"}
            before = "the one" if len(self.pending) == 1 else f"the {len(self.pending)}"
            raise MisuseError(
                f"contribution {len(self.pending) + 1} comes {words[mode]}, {before} pending before it "
                f"{words[first.mode]}: they have no common denominator",
                "give every backward of a group its weight, or none of them",
            )
        if mode == "along" and first.weights is not None and len(first.weights) != terms:
            raise WeightError(
                f"contribution {len(self.pending) + 1} has {counted(terms, 'term')}, what is pending has "
                f"{len(first.weights)}",
                "give every backward of a group the same terms, in the same order (weight 0 for an absent one)",
            )

    def waits(self, parameters: frozenset[int]) -> bool:
        """Whether a pending contribution may have added to any of these parameters."""
        return any(not c.empty and c.reaches(parameters) for c in self.pending)

    def anchor(self, weights: Sequence[Weight], micro_batches: int | None) -> Weight:
        """``ref`` of the group these weights belong to; ``micro_batches``: how many it has, where that is known."""
        if not self.anchored:
            first = next((w for w in weights if isinstance(w, Tensor) or w > 0.0), None)
            self.anchored = first is not None
            if isinstance(first, Tensor):
                self.reference = (first * (micro_batches or 1)).clamp(min=1.0)
            elif first is not None:
                self.reference = 2.0 ** round(math.log2(first)) if micro_batches is None else first * micro_batches
        return self.reference

    def share(self, parameters: frozenset[int], totals: tuple[float, ...] | None) -> Share:
        """The contributions that reach these parameters. ``totals``: W of each term, where a group knew it ahead."""
        own = [c for c in self.pending if c.reaches(parameters)]
        mode: Mode = own[0].mode if own else "plain"
        weights: tuple[Weight, ...] | None = None
        if mode == "ahead":
            weights = totals
        elif own and own[0].weights is not None:
            columns = zip(*(c.weights for c in own if c.weights is not None), strict=True)
            weights = tuple(_sum(column) for column in columns)
        return Share(own, mode, weights)

    def clear(self) -> None:
        self.pending.clear()
        self.anchored = False

    def settle(self, share: Share) -> None:
        """These contributions have been used, skipped or dropped."""
        if len(share.contributions) == len(self.pending):
            self.clear()
        else:
            gone = {id(c) for c in share.contributions}
            self.pending = [c for c in self.pending if id(c) not in gone]


def _sum(values: Iterable[Weight]) -> Weight:
    items = list(values)
    if all(isinstance(item, float) for item in items):
        return math.fsum(items)
    total: Weight = 0.0
    for item in items:
        total = total + (item.double() if isinstance(item, Tensor) and item.device.type != "mps" else item)
    return total


def host_weight(weight: Any, what: str = "weight") -> float:
    """A weight as a float. Raises :class:`WeightError` for what cannot weigh: negative, NaN, infinite, no number."""
    try:
        if isinstance(weight, (bool, str, bytes)) or getattr(weight, "dtype", None) in (torch.bool, bool):
            raise TypeError("a flag or a text is no count")
        value = host(weight) if isinstance(weight, Tensor) and weight.numel() == 1 else float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeightError(f"{what} is {weight!r}, not one number", "the number of supervised elements") from error
    if not 0.0 <= value < math.inf:
        raise WeightError(
            f"{what} is {value}: a micro-batch cannot weigh that", "the number of its supervised elements, 0 for none"
        )
    return value


def host_weights(columns: Sequence[Any]) -> list[tuple[float, ...]]:
    """Weights of several micro-batches (each a number, tensor, or sequence with one entry a term), read in one go."""
    flat: list[Any] = []
    lengths: list[int] = []
    for column in columns:
        entries = list(column) if isinstance(column, (list, tuple)) else [column]
        lengths.append(len(entries))
        flat.extend(entries)
    on_device = [i for i, w in enumerate(flat) if isinstance(w, Tensor) and w.device.type != "cpu" and w.numel() == 1]
    if on_device:
        read = torch.stack([flat[i].detach().reshape(()).double() for i in on_device]).tolist()
        for i, value in zip(on_device, read, strict=True):
            flat[i] = value
    values = [host_weight(weight) for weight in flat]
    if len(set(lengths)) > 1:
        raise WeightError(f"micro-batches of one group gave {lengths} weights", "the same number of terms for each")
    out, start = [], 0
    for length in lengths:
        out.append(tuple(values[start : start + length]))
        start += length
    return out
