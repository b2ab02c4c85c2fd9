"""Examples are who they say they are: the same one twice in an update, or in an epoch, is noticed over all replicas.

Ids are hashed to 62 bits and travel with the row that opens a group. Two examples of a million share a hash once in
ten million runs.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from halfstep.engine.journal import Journal
from halfstep.errors import MisuseError, counted

ON_DUPLICATE = ("warn", "raise", "ignore")
_BITS = 62
_MOST = 1 << 20  # examples of an epoch that are remembered; counting stops there, and the record says so
_SHOWN = 4


def hashed(identity: Any) -> int:
    """An id as a number of 62 bits, the same in every process. Small whole numbers are themselves."""
    if isinstance(identity, int) and 0 <= identity < 1 << _BITS:
        return int(identity)
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _BITS)


def indices_of(loader: Any) -> Iterator[list[Any]] | None:
    """The sampler's own indices, batch by batch, where drawing them a second time changes nothing: else None.

    A ``DistributedSampler`` draws from its seed and epoch, a ``SequentialSampler`` not at all.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if type(batches).__name__ != "BatchSampler" or not getattr(loader, "in_order", True):
        return None
    if type(sampler).__name__ not in ("DistributedSampler", "SequentialSampler"):
        return None
    indices: Iterator[list[Any]] = iter(batches)  # type: ignore[arg-type]
    return indices


def padding_of(loader: Any) -> int:
    """How many examples a ``DistributedSampler`` gives a second time, so that all replicas get as many."""
    sampler = getattr(loader, "sampler", None)
    if type(sampler).__name__ != "DistributedSampler":
        return 0
    return max(int(sampler.total_size) - len(sampler.dataset), 0)  # type: ignore[union-attr]


class Identities:
    """What a run knows of the examples it has used."""

    def __init__(self, policy: str, journal: Journal) -> None:
        self.policy = policy
        self._journal = journal
        self.room = 0
        """Ids that fit into the row of a replica: the most there ever were, alike on all."""
        self.processed = 0
        self.distinct = 0
        self.padding = 0
        """Examples that a sampler gave again to fill up the last batches."""
        self.shared = 0
        """Examples that several replicas had in one update."""
        self.repeated = 0
        """Examples that came again within an epoch, or within one update of a replica, for no reason known."""
        self.whole = True
        self._epoch: set[int] = set()
        self._allowed = 0
        self._told = False

    def begin(self, padding: int) -> None:
        """An epoch begins; ``padding`` examples of it may come twice."""
        self._epoch = set()
        self._allowed = padding
        self._told = False

    def recognise(self, rows: Sequence[tuple[int, Iterable[int]]], own: Iterable[Any], update: int) -> None:
        """Take in the ids of one update, (rank, hashes) of every replica, and tell of examples that are used twice.

        ``own``: the ids of this replica, for the message.
        """
        for told in self._judge(rows, {hashed(identity): identity for identity in own}, update):
            self._journal.note("examples", told)
            if self.policy != "ignore":
                warnings.warn(f"halfstep: {told}", stacklevel=5)

    def _judge(self, rows: Sequence[tuple[int, Iterable[int]]], shown: dict[int, Any], update: int) -> list[str]:
        """What a reader should know of these ids.

        ``shown``: ids of this replica by hash. With ``on_duplicate="raise"`` an example that is twice in one update
        raises :class:`~halfstep.errors.MisuseError`, on every rank alike.
        """
        holders: dict[int, list[int]] = {}
        counts: Counter[int] = Counter()
        for rank, hashes in rows:
            for identity in hashes:
                counts[identity] += 1
                if rank not in holders.setdefault(identity, []):
                    holders[identity].append(rank)
        twice = [identity for identity, ranks in holders.items() if len(ranks) > 1]
        double = [identity for identity, count in counts.items() if count > len(holders[identity])]
        extra = sum(counts[identity] - len(holders[identity]) for identity in double)
        again = [identity for identity in holders if identity in self._epoch and identity not in twice]
        repeats = len(again) + extra
        padded = min(self._allowed, len(twice) + repeats)
        self._allowed -= padded
        self.padding += padded
        told = []
        if padded and not self._told:
            self._told = True
            told.append("DistributedSampler repeats examples to give every replica as many: they are averaged in twice")
        excess = len(twice) + repeats - padded
        if len(twice) > padded:
            told.append(self._shared(twice, holders, shown, update))
        elif extra > padded:
            told.append(self._double(double, shown, update))
        elif excess:
            told.append("examples come again within one epoch, more of them than a sampler's padding explains")
        self.shared += max(len(twice) - padded, 0)
        self.repeated += min(repeats, excess)
        self.processed += sum(counts.values())
        self.distinct += len(holders) - len(again) - len([i for i in twice if i in self._epoch])
        if len(self._epoch) < _MOST:
            self._epoch |= holders.keys()
        else:
            self.whole = False
        return told

    def _shared(self, twice: list[int], holders: dict[int, list[int]], shown: dict[int, Any], update: int) -> str:
        examples = _named(twice, shown)
        ranks = sorted({rank for identity in twice for rank in holders[identity]})
        seen = f"{len(twice)} examples{examples} are on several replicas at once, ranks {ranks}"
        self._refuse(seen, "a sampler that deals the dataset out: DistributedSampler(dataset), with set_epoch", update)
        return f"{seen}: they count more than once. DistributedSampler(dataset) deals it out"

    def _double(self, double: list[int], shown: dict[int, Any], update: int) -> str:
        seen = (
            f"{counted(len(double), 'example')}{_named(double, shown)} came more than once to one replica in one update"
        )
        self._refuse(seen, "a sampler without replacement; ids that tell examples apart", update)
        return f"{seen}: counted more than once"

    def _refuse(self, seen: str, fix: str, update: int) -> None:
        if self.policy == "raise":
            raise MisuseError(
                f"{seen}, in attempted update {update}: they count more than once",
                f'{fix}; on_duplicate="warn" goes on',
            )

    def describe(self) -> dict[str, Any]:
        """For the record."""
        if not self.processed:
            return {"processed": None, "how": "ids are not known: groups(…, ids=…), or a DistributedSampler"}
        return {
            "processed": self.processed,
            "distinct": self.distinct,
            "on_several_replicas_in_one_update": self.shared,
            "repeated_by_a_sampler_as_padding": self.padding,
            "repeated_within_an_epoch": self.repeated,
            "how": "counted by id over all replicas, distinct within each epoch"
            + ("" if self.whole else f"; epochs are longer than {_MOST} examples: those beyond are not remembered"),
        }


def _named(identities: Sequence[int], shown: dict[int, Any]) -> str:
    """Some of them by the ids that are known here."""
    known = [repr(shown[identity]) for identity in identities if identity in shown][:_SHOWN]
    return f" ({', '.join(known)}{', …' if len(identities) > len(known) else ''})" if known else ""
