"""Loaders and samplers: in which order each pass goes through its data. No random number is drawn to know it."""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    dataloader,
)

from halfstep.events import OrderPassed, Place
from halfstep.launch import hide
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_BATCHES = 4096  # of a pass are remembered
_SOURCES = 64  # whose last pass is remembered
_BEGUN = 2  # batches: a pass that goes no further when another begins
_MOST = 4096  # data sets told apart
_FEW = 8  # indices: a shorter permutation is no order of a data set
_DRAWING = {"randperm", "shuffle", "permutation", "sample", "permuted", "randint", "multinomial"}
_SEEDS = ("set_epoch", "seed", "generator", "rng")


class _Pass:
    __slots__ = ("at", "batches", "began", "hashes", "indices", "iterator", "key", "old", "repeats", "sampler")

    def __init__(self, iterator: Any, sampler: Any, key: int, old: list[int], began: int, at: Place | None) -> None:
        self.iterator = weakref.ref(iterator)
        self.sampler = sampler
        self.key = key
        self.old = old
        self.began = began
        self.at = at
        self.batches = self.indices = self.repeats = 0
        self.hashes: list[int] = []

    def take(self, batch: Any) -> None:
        """Note the next batch of indices and whether the pass before had the very same ones up to here."""
        many = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        number = hash((self.hashes[-1] if self.hashes else 0, many))
        if self.repeats == self.batches < len(self.old) and self.old[self.batches] == number:
            self.repeats += 1
        self.batches += 1
        self.indices += len(many)
        if len(self.hashes) < _BATCHES:
            self.hashes.append(number)


class Loaders:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._passes: dict[int, _Pass] = {}  # id(iterator) -> its pass
        self._last: OrderedDict[int, list[int]] = OrderedDict()  # source -> the order of its last training pass
        self._keys: dict[Any, int] = {}
        self._homes: dict[Any, tuple[Any, int]] = {}  # line, type and size -> the data last seen there, its number
        self._drawn: OrderedDict[tuple[str, int], tuple[int, int, int]] = OrderedDict()  # line -> hash, micro, key
        self._loading = 0
        self._numpy = False

    def install(self, patches: Patches) -> None:
        base = dataloader._BaseDataLoaderIter
        patches.around(base, "__init__", self._before_begin, self._after_begin, self._failed_begin)
        patches.around(base, "_reset", self._before_begin, self._after_begin, self._failed_begin)
        patches.around(base, "_next_index", self._before_begin, self._after_index, self._failed_begin)
        patches.around(base, "__next__", self._before_next, None, self._failed_next)
        self._patch_randperm(patches)
        for owner in (random, random.Random):
            patches.around(owner, "shuffle", None, self._after_shuffle)
            patches.around(owner, "sample", None, self._after_sample)
        self._numpy = False
        self._patch_numpy(patches)
        patches.around(torch.optim.Optimizer, "__init__", None, lambda *_: self._patch_numpy(patches))

    # -- a loader's passes ---------------------------------------------------------------------------------------

    def _before_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loading += 1

    def _failed_begin(self, token: Any, error: BaseException) -> None:
        self._loading -= 1

    def _after_begin(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loading -= 1
        iterator, loader = args[0], kwargs.get("loader", args[1] if len(args) > 1 else None)
        if not isinstance(loader, torch.utils.data.DataLoader):
            return
        sampler = innermost(loader)
        at = self._session.place()
        key = self._source(loader.dataset, at, type(sampler).__name__, loader.batch_size)
        for ident, old in list(self._passes.items()):
            if old.iterator() is None or ident == id(iterator) or (old.key == key and old.batches >= _BEGUN):
                self._end(ident, whole=False)  # broken off
        micro = self._session.stream.micro
        self._passes[id(iterator)] = _Pass(iterator, sampler, key, self._last.get(key, []), micro, at)

    def _after_index(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loading -= 1
        running = self._passes.get(id(args[0]))
        if running is not None:
            running.take(result)

    def _before_next(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return id(args[0])

    def _failed_next(self, token: Any, error: BaseException) -> None:
        if isinstance(error, StopIteration) and token in self._passes:
            self._end(token, whole=True)

    def _end(self, ident: int, whole: bool) -> None:
        running = self._passes.pop(ident)
        if self._session.stream.micro == running.began or not running.batches:
            return  # nothing was learnt from it: an evaluation
        self._last[running.key] = running.hashes
        self._last.move_to_end(running.key)
        while len(self._last) > _SOURCES:
            self._last.popitem(last=False)
        self._session.stream.emit(
            OrderPassed,
            at=running.at,
            source=running.key,
            sampler=type(running.sampler).__name__,
            shuffles=shuffles(running.sampler),
            began=running.began,
            batches=running.batches,
            indices=running.indices,
            repeats=running.repeats,
            whole=whole,
            sampler_epoch=callable(getattr(running.sampler, "set_epoch", None)),
        )

    def _source(self, data: Any, at: Place | None, *rest: Any) -> int:
        """The number of this data. Data made anew for each pass, at one line and of one size, counts as the same."""
        try:
            which: Any = ("data", self._session.ident("data", data))
            there: Any = weakref.ref(data)
        except TypeError:  # a list and the like
            which, there = ("object", id(data)), lambda: data
        key = self._keys.get((which, rest))
        home = (at, type(data), _size(data), rest)
        if key is None:
            before, known = self._homes.get(home, (None, 0))
            key = known if before is not None and before() is None else len(self._keys) + 1
            if len(self._keys) < _MOST:
                self._keys[(which, rest)] = key
        if len(self._homes) < _MOST or home in self._homes:
            self._homes[home] = (there, key)
        return key

    def drawn_at(self) -> Place | None:
        """The line that drew the last permutation by hand."""
        if not self._drawn:
            return None
        (file, line), _ = next(reversed(self._drawn.items()))
        return Place(file, line)

    def _patch_numpy(self, patches: Patches) -> None:
        """NumPy's own functions, once the script has imported it (it has when it makes an optimizer)."""
        if "numpy.random" in sys.modules and not self._numpy:
            self._numpy = True
            patches.around(sys.modules["numpy.random"], "shuffle", None, self._after_shuffle)
            patches.around(sys.modules["numpy.random"], "permutation", None, self._after_draw)

    # -- permutations drawn by hand ------------------------------------------------------------------------------

    def _patch_randperm(self, patches: Patches) -> None:
        original = torch.randperm

        @functools.wraps(original)
        def randperm(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = original(*args, **kwargs)
            if torch.compiler.is_compiling() or not patches.live or self._loading:
                return result
            try:
                with self._session.look.silent():
                    self._permuted(result)
            except Exception as error:
                self._session.fault("randperm", error)
            return result

        hide(randperm)
        patches.replace(torch, "randperm", randperm)

    def _permuted(self, order: torch.Tensor) -> None:
        if order.device.type == "cpu" and order.numel() >= _FEW and type(order) is torch.Tensor:
            self._drew("randperm", hash(order.numpy().tobytes()), order.numel())

    def _after_shuffle(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A list or an array, in an order of its own now: the last positional argument of a function or a method."""
        self._shuffled("shuffle", kwargs.get("x", args[-1] if args else None))

    def _after_draw(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._shuffled("permutation", result)

    def _after_sample(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(result) in map(_size, (*args, *kwargs.values())):  # all of them: an order, not a selection
            self._shuffled("permutation", result)

    def _shuffled(self, how: str, order: Any) -> None:
        if self._loading or (_size(order) or 0) < _FEW:
            return
        try:
            if isinstance(order, list):
                self._drew(how, hash(tuple(order)), len(order))
            elif hasattr(order, "tobytes"):
                self._drew(how, hash(order.tobytes()), len(order))
        except TypeError:  # a list of lists
            return

    def _drew(self, how: str, number: int, size: int) -> None:
        at = self._session.place()
        if at is None:
            return
        micro = self._session.stream.micro
        line = (at.file, at.line)
        old, began, key = self._drawn.get(line, (None, micro, 0))
        key = key or -len(self._drawn) - 1
        self._drawn[line] = (number, micro, key)
        self._drawn.move_to_end(line)
        while len(self._drawn) > _SOURCES:
            self._drawn.popitem(last=False)
        if old is not None and micro > began:
            self._session.stream.emit(
                OrderPassed,
                at=at,
                source=key,
                sampler=how,
                shuffles=True,
                began=began,
                batches=1,
                indices=size,
                repeats=int(old == number),
            )


def shuffles(sampler: Any) -> bool:
    """Whether a sampler means to give another order each pass; one that sorts or groups on purpose does not."""
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        return True
    if isinstance(sampler, SequentialSampler):
        return False
    said = getattr(sampler, "shuffle", None)
    if isinstance(said, bool):
        return said
    if isinstance(sampler, DistributedSampler):
        return True
    code = getattr(getattr(type(sampler), "__iter__", None), "__code__", None)
    draws = code is not None and not _DRAWING.isdisjoint(code.co_names)
    return draws or any(hasattr(sampler, name) for name in _SEEDS)


def _size(data: Any) -> int | None:
    try:
        return len(data)
    except Exception:
        return None  # a stream, or the user's own way to count


def innermost(loader: Any) -> Any:
    sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
    while isinstance(sampler, BatchSampler) and type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler
