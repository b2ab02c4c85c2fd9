"""What replicas tell each other around a group: one row each before it, one after it where weights come late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halfstep.engine.replicas.collectives import Link, bits, gather, number
from halfstep.errors import MisuseError, UnsupportedError, WeightError

TERMS = 8  # losses with a denominator of their own that fit in a row
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of a group, before its first forward.

    ``live``     micro-batches of positive weight; None where weights come later
    ``ended``    whether its loader is at its end; ``spare``: whether it has a micro-batch to go through again
    ``weights``  its sums, one a term; None where they come later
    """

    rank: int
    policy: int
    attempted: int
    size: int
    micro_batches: int
    live: int | None
    ended: bool
    spare: bool
    examples: int | None
    weights: tuple[float, ...] | None
    ids: int = _UNKNOWN
    """How many ids it tells; -1 where they are not known."""

    def row(self) -> list[int]:
        weights = self.weights or ()
        return [
            self.rank,
            self.policy,
            self.attempted,
            self.size,
            self.micro_batches,
            _UNKNOWN if self.live is None else self.live,
            int(self.ended),
            int(self.spare),
            _UNKNOWN if self.examples is None else self.examples,
            self.ids,
            _UNKNOWN if self.weights is None else len(weights),
            *map(bits, _padded(weights)),
        ]

    @classmethod
    def of(cls, row: Sequence[int]) -> Share:
        count = row[10]
        weights = None if count == _UNKNOWN else tuple(map(number, row[11 : 11 + count]))
        live, examples = (None if value == _UNKNOWN else value for value in (row[5], row[8]))
        rank, policy, attempted, size, micro_batches = row[:5]
        return cls(
            rank, policy, attempted, size, micro_batches, live, bool(row[6]), bool(row[7]), examples, weights, row[9]
        )


@dataclass(frozen=True, slots=True)
class Opening:
    """A group as all replicas see it.

    ``weights``  W of each term over all of them; None where weights come later
    ``longest``  micro-batches of the replica that has most
    ``dry``      ranks that have none
    """

    shares: list[Share]
    weights: tuple[float, ...] | None = None
    ids: list[list[int]] = field(default_factory=list)
    """Hashes of each replica's examples, where they are known."""

    @property
    def longest(self) -> int:
        return max(share.micro_batches for share in self.shares)

    @property
    def dry(self) -> list[int]:
        return [share.rank for share in self.shares if not share.micro_batches]

    @property
    def short(self) -> bool:
        return any(share.micro_batches < share.size for share in self.shares)

    @property
    def identified(self) -> bool:
        """Whether every replica told the ids of its examples."""
        return all(share.ids != _UNKNOWN or not share.micro_batches for share in self.shares)

    @property
    def uneven(self) -> bool:
        return any(share.micro_batches != self.longest for share in self.shares)

    def require_spare(self) -> None:
        """Raise where a replica has too few micro-batches, and none to go through again to keep the others company."""
        bare = [s.rank for s in self.shares if s.micro_batches < self.longest and not s.micro_batches and not s.spare]
        if bare:
            raise MisuseError(
                f"rank {bare[0]} has no micro-batch to go through, others have {self.longest}: each forward is a "
                "collective of all (a sharded model, SyncBatchNorm), so that every rank has to run as many",
                "give every rank data (a sampler for each replica); one that has less than others goes through its "
                "last micro-batch again, at weight 0",
            )

    @property
    def over(self) -> bool:
        """Whether no replica has anything left."""
        return self.longest == 0

    @property
    def complete(self) -> bool:
        """Whether every replica is sure to run a backward, as far as weights are known."""
        return all((s.micro_batches if s.live is None else s.live) > 0 for s in self.shares)

    @property
    def examples(self) -> int | None:
        counts = [share.examples for share in self.shares]
        return None if None in counts else sum(count or 0 for count in counts)


def open_group(share: Share, links: Sequence[Link], ids: Sequence[int], room: int) -> Opening:
    """Show every replica's part of a group to all. A collective; raises on every rank alike where they disagree.

    ``ids`` ride along as far as there is ``room``; where a replica has more, they take a second row.
    """
    rows = gather([*share.row(), *_filled(ids, room)], links)
    shares = [Share.of(row) for row in rows]
    given = [row[-room:] if room else [] for row in rows]
    most = max(share.ids for share in shares)
    if most > room:
        given = gather(_filled(ids, most), links)
    extra = [row[: max(share.ids, 0)] for row, share in zip(given, shares, strict=True)]
    _require_same(shares, "policy", "the managers have different policies, or groups another reduction or drop_last")
    _require_same(shares, "attempted", "replicas have attempted different numbers of updates")
    _require_same(shares, "size", "replicas asked for groups of different sizes")
    known = [s.weights for s in shares if s.micro_batches]
    if not known or known[0] is None:
        if any(weights is not None for weights in known):
            raise WeightError("some replicas know the weights of this group, others do not", "the same weight= on all")
        return Opening(shares, None, extra)
    terms = {_UNKNOWN if weights is None else len(weights) for weights in known}
    if len(terms) != 1:
        raise WeightError(f"replicas gave {sorted(terms)} weights for one group", "the same weight= on all of them")
    return Opening(shares, tuple(math.fsum(column) for column in zip(*(w or () for w in known), strict=True)), extra)


def require_terms(weights: Sequence[float]) -> None:
    if len(weights) > TERMS:
        raise UnsupportedError(
            f"a loss of {len(weights)} terms on several replicas: {TERMS} fit into what they exchange",
            "add up terms that share a denominator",
        )


def _filled(ids: Sequence[int], room: int) -> list[int]:
    return [*ids[:room], *[0] * (room - len(ids))]


def _padded(weights: Sequence[float]) -> list[float]:
    return [*weights, *[0.0] * (TERMS - len(weights))]


def _require_same(shares: Sequence[Share], name: str, what: str) -> None:
    values = {getattr(share, name): share.rank for share in shares}
    if len(values) > 1:
        shown = "" if name == "policy" else ": " + ", ".join(f"{v} on rank {r}" for v, r in sorted(values.items()))
        raise MisuseError(
            f"{what}{shown}",
            "make, load and use the manager alike on every rank (print(manager) shows the whole policy)",
        )


# --- after the last contribution -------------------------------------------------------------------------------------

MODES = ("plain", "along", "ahead")


@dataclass(frozen=True, slots=True)
class Closing:
    """What is pending on all replicas: W of each term, whether there is anything, whether gradients are local yet."""

    weights: tuple[Any, ...] | None
    empty: bool
    local: bool
    examples: int | None = None
    """Of all replicas, where that is known."""


def close_group(
    rank: int,
    mode: str,
    contributions: int,
    weights: Sequence[float] | None,
    *,
    empty: bool,
    local: bool,
    guessed: bool,
    links: Sequence[Link],
) -> Closing:
    """Add up what was counted along. A collective; raises on every rank alike where replicas disagree."""
    own = tuple(weights or ())
    flags = [rank, MODES.index(mode), contributions, int(empty), int(local), int(guessed), len(own)]
    rows: list[Any] = gather([*flags, *map(bits, _padded(own))], links)
    having = [row for row in rows if row[2]] or rows
    for position, what in ((1, "with a weight on some replicas, without on others"), (6, "of different terms")):
        if len({row[position] for row in having}) > 1:
            raise WeightError(f"contributions came {what}", "the same calls of backward on every rank")
    live = [row for row in having if not row[3]]
    if len({row[5] for row in live}) > 1:
        ranks = ", ".join(str(row[0]) for row in live if row[5])
        raise WeightError(
            f"weights could be read from the loss on some replicas; examples were counted instead on rank {ranks}",
            "groups(loader, size, weight=…) with the number of supervised elements",
        )
    everywhere_empty = all(row[3] for row in rows)
    local_anywhere = any(row[4] for row in rows)
    if having[0][1] != MODES.index("along"):
        return Closing(None, everywhere_empty, local_anywhere)
    columns = zip(*(map(number, row[7 : 7 + row[6]]) for row in having), strict=True)
    total = tuple(math.fsum(column) for column in columns)
    return Closing(total, everywhere_empty or not any(total), local_anywhere)
