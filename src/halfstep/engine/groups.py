"""An epoch in groups: each is fetched before its first forward, and is one update on all replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from torch import nn

from halfstep.engine.group import REDUCTIONS, Batch, Group, Weigher, examples_of, listed, pick, tokens
from halfstep.engine.replicas.identities import hashed, indices_of, padding_of
from halfstep.engine.settings import flag
from halfstep.errors import MisuseError, PolicyError, counted

if TYPE_CHECKING:
    from halfstep.engine.manager import MixedPrecisionManager


class Groups(Generic[Batch]):
    """One epoch: an iterator of groups over any iterable of micro-batches. See ``MixedPrecisionManager.groups``."""

    def __init__(
        self,
        manager: MixedPrecisionManager,
        loader: Iterable[Batch],
        size: int,
        *,
        weight: Weigher | str | int | None,
        reduction: str,
        drop_last: bool,
        model: nn.Module | None,
        ids: Weigher | str | int | None,
    ) -> None:
        if isinstance(loader, int) and isinstance(size, Iterable):
            raise PolicyError(
                f"groups was given a loader of type int and a size of type {type(size).__name__}: they stand the other "
                "way round",
                f"groups(loader, {loader})",
            )
        if isinstance(size, bool) or not isinstance(size, int):
            shown = repr(size) if isinstance(size, (bool, float, str)) else f"of type {type(size).__name__}"
            raise PolicyError(f"group size {shown} is no whole number", "the number of micro-batches of an update")
        if size < 1:
            raise PolicyError(f"group size {size}: an update needs at least one micro-batch", "size=1 or more")
        if reduction not in REDUCTIONS:
            raise PolicyError(f"unknown reduction {reduction!r}", f"one of {', '.join(map(repr, REDUCTIONS))}")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise PolicyError(f"the loader, of type {type(loader).__name__}, cannot be iterated", "an iterable")
        self._manager = manager
        self._loader = loader
        self._size = size
        if model is not None and not isinstance(model, nn.Module):
            raise PolicyError(
                f"groups was given model={model!r}, of type {type(model).__name__}"[:200],
                "the module that is trained, as it is wrapped",
            )
        self._weigher = _function(weight, "weight")
        self._weight = "read from the loss" if weight is None else getattr(weight, "__name__", repr(weight))
        self._reduction = reduction
        self._drop_last = flag("drop_last", drop_last)
        self._model = model
        self._ids = _function(ids, "ids")
        self._iterator: Iterator[Batch] | None = None
        self._spare: Batch | None = None
        self._indices: Iterator[list[Any]] | None = None
        self._ended = False  # the loader is
        self._finished = False  # the epoch is
        self._index = 0

    def __iter__(self) -> Iterator[Group[Batch]]:
        return self

    def __next__(self) -> Group[Batch]:
        manager = self._manager
        manager._order.require_no_group()
        replicas = manager.replicas
        if not replicas.alone:
            if self._model is not None:
                manager._meet((self._model,))
            replicas.require_known("a group was opened")
        elif self._model is not None:
            replicas.meet((self._model,))
        if self._ended and replicas.local:
            self._finish()
        if self._iterator is None and not self._ended:
            self._iterator, taken = manager._position.begin(self._loader, self._size, manager.replicas.degree)
            self._index = taken // self._size
            manager._identities.begin(padding_of(self._loader))
            if self._ids is None and not replicas.local:
                self._indices = indices_of(self._loader)
                list(itertools.islice(self._indices or (), manager._position.micro_batches))
        batches: list[Batch] = []
        while len(batches) < self._size and self._iterator is not None:
            try:
                batches.append(next(self._iterator))
            except StopIteration:
                self._ended = manager._position.exhausted = True
                self._iterator = None
                break
        if self._ended and not batches and replicas.local:
            if self._index == 0 and manager._position.micro_batches == 0:
                raise MisuseError(
                    "the loader gave no micro-batch at all",
                    "a generator can be used only once: make it anew for each epoch; or the dataset, or this rank's "
                    "share of it, is empty",
                )
            self._finish()
        if replicas.local and len(batches) < self._size and self._drop_last:
            self._drop(batches)
            self._finish()
        group = Group(
            manager,
            batches,
            size=self._size,
            index=self._index,
            weigher=self._weigher,
            reduction=self._reduction,
            model=self._model,
            ids=self._ids,
        )
        if self._indices is not None:
            drawn = itertools.chain.from_iterable(itertools.islice(self._indices, len(batches)))
            group.known = list(drawn)
        if not replicas.local:
            self._join(group, batches)
        elif group.known is not None:
            manager._identities.recognise(
                [(0, list(map(hashed, group.known)))], group.known, manager._account.attempted + 1
            )
        self._index += 1
        manager._order.open(group)
        return group

    def _join(self, group: Group[Batch], batches: list[Batch]) -> None:
        """Open the group on all replicas. The last one is decided for all: dropped where it is short anywhere."""
        manager = self._manager
        replicas = manager.replicas
        if batches:
            self._spare = batches[-1] if replicas.lockstep else None
        own = group.micro_weights
        identities, known = manager._identities, group.known
        hashes = list(map(hashed, known or ()))
        opening = replicas.open(
            replicas.share(
                (self._reduction, self._drop_last),
                attempted=manager._account.attempted,
                size=self._size,
                micro_batches=group.own,
                live=None if own is None else sum(any(weights) for weights in own),
                ended=self._ended,
                spare=self._spare is not None,
                examples=group.examples,
                weights=None if own is None else group.weights,
                ids=-1 if known is None else len(known),
            ),
            hashes,
            identities.room,
        )
        if opening.over:
            if self._index == 0 and manager._position.micro_batches == 0:
                raise MisuseError("the loaders gave no micro-batch at all, on any replica", "make them anew each epoch")
            self._finish()
        identities.room = max(identities.room, *(len(ids) for ids in opening.ids))
        if opening.short and self._drop_last:
            self._drop(batches)
            self._finish()
        if opening.identified:
            ranks = [share.rank for share in opening.shares]
            rows = list(zip(ranks, opening.ids, strict=True))
            identities.recognise(rows, known or (), manager._account.attempted + 1)
        group.join(opening, self._spare)
        if not group.own and opening.weights is None and self._reduction != "none":
            manager._contributor.agree((0.0,), self._size)

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._manager._position.end()
        raise StopIteration

    def _drop(self, batches: Sequence[Batch]) -> None:
        counts = [examples_of(batch) for batch in batches]
        self._manager._account.last_group(
            kept=False,
            micro_batches=len(batches),
            size=self._size,
            examples=None if None in counts else sum(n or 0 for n in counts),
            ids=None if self._ids is None else [i for batch in batches for i in listed(self._ids(batch))],
        )

    @property
    def epoch(self) -> int:
        """The number of this pass over the loader, from 0, over resumed runs too: for ``sampler.set_epoch``."""
        return self._manager._position.epoch_of(self._iterator is not None)

    def __len__(self) -> int:
        """Groups in an epoch, where the loader knows its length."""
        count = len(self._loader)  # type: ignore[arg-type]
        return count // self._size if self._drop_last else -(-count // self._size)

    def __repr__(self) -> str:
        known = f"{counted(len(self), 'group')} of " if hasattr(self._loader, "__len__") else "groups of "
        last = ", drop_last" if self._drop_last else ""
        policy = f"weight {self._weight}, reduction {self._reduction}{last}"
        return f"Groups({known}{counted(self._size, 'micro-batch')}, {policy})"


_MEANT = {
    "weight": "weight= counts supervised elements: a function of a micro-batch, or the key of the part that holds the "
    "count; for the same number in all, lambda batch: 3",
    "ids": "ids= names the examples: the key of the part of a micro-batch that holds their ids, or a function of it",
}


def _function(rule: Weigher | str | int | None, name: str) -> Weigher | None:
    """``weight`` or ``ids`` as given -> a function of a micro-batch."""
    if rule is tokens:
        raise PolicyError(f"{name}=tokens was not called", 'tokens("labels"), which gives the function')
    if rule is None or callable(rule):
        return rule
    if isinstance(rule, (str, int)) and not isinstance(rule, bool):
        return lambda batch: pick(batch, rule, _MEANT[name])
    fix = 'a function, a key, or None; tokens("labels")' if name == "weight" else "a function, a key, or None"
    if name == "weight" and isinstance(rule, (list, tuple)):
        fix = "one function that returns a weight for each term: lambda batch: (count_one(batch), count_two(batch))"
    raise PolicyError(f"{name}={rule!r} is no function of a micro-batch", fix)
