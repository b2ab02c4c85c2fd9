"""Groups of micro-batches: fetched first, so that their denominators are known before the first forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from halfstep.engine.ledger import Mode, Share, host_weights
from halfstep.errors import GroupError, PolicyError, counted

if TYPE_CHECKING:
    from halfstep.engine.manager import MixedPrecisionManager
    from halfstep.engine.replicas.rows import Opening

REDUCTIONS = ("mean", "sum", "none")
Batch = TypeVar("Batch")
Weigher = Callable[[Any], Any]


def tokens(key: str | int = "labels", *, ignore_index: int = -100, shift: bool = True) -> Weigher:
    """The usual weight of a language-model micro-batch: a function that counts its supervised tokens.

    ``key`` finds the labels in the micro-batch (a mapping's key, a sequence's index, or an attribute); every label but
    ``ignore_index`` counts. ``shift=True`` is for models that predict the next token from labels of the inputs' own
    length, as Hugging Face's do: the first label of each sequence, the last dimension, is then never predicted.
    ``shift=False`` is for labels that are shifted already.
    """

    _require_key(key, "tokens")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise PolicyError(f"tokens(ignore_index={ignore_index!r}) is no label", "a whole number: torch's is -100")

    def weight(batch: Any) -> Tensor:
        labels = pick(batch, key)
        if not isinstance(labels, Tensor):
            labels = torch.as_tensor(labels)
        return (labels[..., 1:] if shift else labels).ne(ignore_index).sum()

    weight.__name__ = f"tokens({key!r}, ignore_index={ignore_index}, shift={shift})"
    return weight


def _require_key(key: Any, of: str) -> None:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise PolicyError(
            f"{of}({key!r}) names no part of a micro-batch", 'the key (or index) of the labels: tokens("labels")'
        )


def pick(batch: Any, key: str | int, meant: str = "the key of the labels") -> Any:
    """``batch[key]``, or the attribute of that name. ``meant``: what it should have been, for the message."""
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError) as error:
        if isinstance(key, str) and hasattr(batch, key):
            return getattr(batch, key)
        has = f"; it has {sorted(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise PolicyError(f"a micro-batch of type {type(batch).__name__} has no {key!r}{has}", meant) from error


def examples_of(batch: Any) -> int | None:
    """The leading dimension of the first tensor found in a micro-batch; None where there is none."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    inner: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        inner = batch.values()
    elif isinstance(batch, (list, tuple)):
        inner = batch
    elif hasattr(batch, "__dict__"):
        inner = vars(batch).values()
    for item in inner:
        found = examples_of(item) if isinstance(item, (Tensor, Mapping, list, tuple)) else None
        if found is not None:
            return found
    return None


class Group(Generic[Batch]):
    """The micro-batches of one update: iterate over it once, with one ``manager.backward`` for each (several losses as
    a list; more than one backward only where weights are known ahead).

    ``weight``    W, the supervised elements of the whole group and of every replica; None where they are read from
                  the loss as it comes. ``weights`` has one entry a term.
    ``examples``  leading dimensions, summed; None where unknown
    ``ids``       what ``ids`` gave for each micro-batch, chained
    ``short``     whether the loader ended before ``size`` micro-batches
    ``index``     position in its epoch, from 0
    """

    def __init__(
        self,
        manager: MixedPrecisionManager,
        batches: list[Batch],
        *,
        size: int,
        index: int,
        weigher: Weigher | None,
        reduction: str,
        model: nn.Module | None,
        ids: Weigher | None,
    ) -> None:
        self._manager = manager
        self._batches: list[Batch | None] = list(batches)
        self.own = len(batches)
        """Micro-batches of this replica's own; those after them only keep it in company, and weigh nothing."""
        self.opening: Opening | None = None
        self.exchange_at: int | None = None
        """The micro-batch whose backward exchanges gradients."""
        self.apart = False
        """Whether the engine exchanges gradients, at the update."""
        self._model = model
        self._length = len(batches)
        self.size = size
        self.index = index
        self.reduction = reduction
        self.short = self._length < size
        self.example_counts = [examples_of(batch) for batch in batches]
        self.examples = None if None in self.example_counts else sum(n or 0 for n in self.example_counts)
        self.ids = None if ids is None else list(itertools.chain.from_iterable(listed(ids(b)) for b in batches))
        self.known: list[Any] | None = self.ids
        """What tells its examples apart: ``ids``, or the indices of a sampler."""
        self.micro_weights: list[tuple[float, ...]] | None = None
        self.weights: tuple[float, ...] | None = None
        if weigher is not None:
            self.micro_weights = host_weights([weigher(batch) for batch in batches])
        elif reduction == "none" and self.examples is not None:
            self.micro_weights = [(float(n or 0),) for n in self.example_counts]
        if self.micro_weights is not None:
            self.weights = tuple(sum(column) for column in zip(*self.micro_weights, strict=True))
        self.position = -1  # of the micro-batch now being worked on
        self.contributed = True  # whether it had its backward
        self.exhausted = False
        self.closed = False

    def join(self, opening: Opening, spare: Batch | None) -> None:
        """Take this group's part in that of all replicas. ``spare``: a micro-batch to go through once more."""
        replicas = self._manager.replicas
        self.opening, self.weights = opening, opening.weights
        missing = opening.longest - self.own if replicas.lockstep else 0
        if replicas.lockstep:
            opening.require_spare()
        if missing:
            self._batches += [spare] * missing
            self.example_counts += [0] * missing
            self._length += missing
            if self.micro_weights is not None:
                self.micro_weights += [(0.0,) * len(self.weights or ())] * missing
        self.exchange_at, self.apart = replicas.exchange_at(self._model, opening, self.micro_weights, self._length)

    def nothing(self) -> Share:
        """The contributions of a replica that ran dry: it takes part in the update all the same."""
        weights = None if self.opening is None else self.opening.weights
        mode: Mode = "ahead" if weights is not None else "plain" if self.reduction == "none" else "along"
        return Share([], mode, weights)

    @property
    def filling(self) -> bool:
        """Whether the micro-batch now being worked on only keeps this replica in company."""
        return self.position >= self.own

    @property
    def weight(self) -> float | None:
        return self.weights[0] if self.weights else None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        if self.exhausted or self.closed:
            raise GroupError(
                f"group {self.index + 1} was iterated a second time: its micro-batches are released as they are used",
                "do all the work on a micro-batch in one pass over the group",
            )
        return self

    def __next__(self) -> Batch:
        manager = self._manager
        if self.closed and not self.whole:
            raise GroupError(f"group {self.index + 1} was dropped", "take the next group from manager.groups")
        if not self.contributed:
            raise GroupError(
                f"micro-batch {self.position + 1} of {self._length} went by without manager.backward: the group's "
                "denominator counts it",
                "call backward for every micro-batch (weight 0 for one that supervises nothing); leave examples out in "
                "the loader, before the group is formed",
            )
        manager.replicas.free(self._model)
        if self.position + 1 == self._length:
            self.exhausted = True
            raise StopIteration
        self.position += 1
        self.contributed = False
        batch = self._batches[self.position]
        self._batches[self.position] = None
        if not manager.replicas.local:
            first = self.position == 0 and self.exchange_at is not None
            manager.replicas.hold(self._model, self.position == self.exchange_at, buffers=first)
        return batch  # type: ignore[return-value]

    @property
    def whole(self) -> bool:
        """Whether every micro-batch has been contributed."""
        return self.position + 1 == self._length and self.contributed

    def progress(self) -> str:
        done = self.position + 1 if self.contributed else self.position
        return f"{max(done, 0)} of {counted(self._length, 'micro-batch')}"

    def leave(self) -> None:
        """Put back what the group changed, however it is left."""
        self.closed = True
        self._batches = [None] * self._length
        self._manager.replicas.free(self._model)

    def __repr__(self) -> str:
        weight = "read from the loss" if self.weights is None else f"weight {self.weight:g}"
        return f"Group({self.index + 1}: {counted(self._length, 'micro-batch')}, {weight})"


def listed(ids: Any) -> list[Any]:
    if isinstance(ids, Tensor):
        values = ids.tolist()
        return values if isinstance(values, list) else [values]
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        return [ids]
    return list(ids)
