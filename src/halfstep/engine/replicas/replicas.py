"""Who else contributes to an update: D replicas, and the R ranks a backend averages gradients over.

One process is D = R = 1 and exchanges nothing. With others, the model tells who they are (``meet``), or the process
group given as ``replicas``. The engine then calls these at fixed moments, on every rank in the same order:

==================  ===========================================================================================
``degree``          D, the replicas: each sees other examples
``averaging``       R, the ranks whose gradients are averaged
``open``            before a group: everybody's micro-batches and weights -> W over all replicas
``hold`` / ``free`` around each micro-batch of a group, forward included: ``hold(False)`` keeps gradients local,
                    ``free`` puts back what was
``done``            after a backward
``nothing``         instead of one, for a micro-batch of weight 0: other ranks may wait for it
``reference``       once in a run: what weights that are counted along are divided by on the way, alike everywhere
``close``           after the last contribution, where W was counted along
``average``         gradients that no backward has exchanged
``whole``           norms of what is stored here -> norms of whole gradients
==================  ===========================================================================================
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from halfstep.engine.graph import nodes
from halfstep.engine.replicas import collectives
from halfstep.engine.replicas.collectives import Link
from halfstep.engine.replicas.layout import Layout, declared_link, infer, require_unwrapped
from halfstep.engine.replicas.rows import Closing, Opening, Share, close_group, open_group, require_terms
from halfstep.engine.replicas.wrappers import Ddp, Wrapper
from halfstep.errors import MisuseError, UnsupportedError


class Replicas:
    """The replicas of one manager.

    ``declared``, as given to it: None (what the model shows, once it is seen), a process group, a mesh of one
    dimension, a wrapped model or several, or 1: none but this process.
    """

    def __init__(self, declared: Any = None) -> None:
        self.degree = 1
        self.averaging: float = 1
        self.backend = "one process"
        self.how = "not distributed"
        self.local = True
        """Whether nothing is exchanged, so that the host may decide by itself."""
        self.notes: list[str] = []
        self.scale: float | None = None
        """The reference of weights that are counted along, once it is agreed upon."""
        self.policy = 0
        self.settle: Callable[[], None] = lambda: None
        """Bring the books up to date: called before a lost rank is told."""
        self.by_itself = type(declared) is int and declared == 1
        """Whether this process was declared to train a model of its own."""
        given = declared if isinstance(declared, (list, tuple)) else (declared,)
        models = [model for model in given if isinstance(model, nn.Module)]
        self._declared = declared_link(None if self.by_itself or len(models) == len(given) else declared)
        self._links: tuple[Link, ...] = ()
        self._met: dict[tuple[int, ...], tuple[list[Any], Layout]] = {}
        self._apart: dict[tuple[int, ...], list[Any]] = {}
        """Models that train for themselves, as declared, and were looked at."""
        if self._declared is not None:
            self._links = (self._declared,)
            self.degree = len(collectives.members(self._declared))
            self.averaging = self.degree
            self.backend, self.how = "declared", "declared: a process group of its own"
            self.local = False
        for model in models:
            self.meet((model,))

    @property
    def alone(self) -> bool:
        """Whether there is nobody else, and no process group that might have others in it."""
        return self.local and (self.by_itself or not collectives.initialised())

    # --- who they are ---

    def meet(self, modules: Sequence[nn.Module]) -> list[str]:
        """Learn from a model who its replicas are, the first time it is seen: what a reader should know of it."""
        if self.by_itself or (self.local and not collectives.initialised()):
            if self.by_itself and collectives.initialised():
                self._require_alone(modules)
            return []
        key = tuple(map(id, modules))
        known = self._met.get(key)
        if known is not None and all(ref() is module for ref, module in zip(known[0], modules, strict=True)):
            return []
        layout = infer(modules, self._declared, [w for _, other in self._met.values() for w in other.wrappers])
        if layout.links and self._links and self._met:
            known_members = [collectives.members(link) for link in self._links]
            if known_members != [collectives.members(link) for link in layout.links]:
                raise UnsupportedError(
                    f"one manager was given models of different replicas: {self.how}, and {layout.how}",
                    "one manager for each set of replicas",
                )
        self._met[key] = [weakref.ref(module) for module in modules], layout
        if layout.links and not layout.wrappers:
            with self.answered("sums of parameters"):
                if collectives.differ([p for module in modules for p in module.parameters()], layout.links):
                    raise MisuseError(
                        "the parameters differ between the replicas: averaged gradients would keep them apart",
                        "one seed, or one checkpoint, for all of them; DistributedDataParallel sends those of rank 0",
                    )
        if layout.links or not self._links:
            self._links = layout.links
            self.degree, self.averaging = layout.degree, layout.averaging
            self.backend, self.how = layout.backend, layout.how
            self.local = not layout.links
        self.notes.extend(layout.notes)
        return layout.notes

    def _require_alone(self, modules: Sequence[nn.Module]) -> None:
        """``replicas=1`` was declared: refuse a model whose gradients several ranks exchange, when first seen."""
        key = tuple(map(id, modules))
        known = self._apart.get(key)
        if known is not None and all(ref() is module for ref, module in zip(known, modules, strict=True)):
            return
        require_unwrapped(modules)
        self._apart[key] = [weakref.ref(module) for module in modules]

    def require_known(self, what: str) -> None:
        """Raise where there is a process group of several, and nobody said who the replicas are."""
        if self.local and not self.by_itself and not self._met and collectives.world() > 1:
            raise MisuseError(
                f"{what}, in a process group of {collectives.world()} ranks, before it is known who the replicas are",
                "manager.groups(…, model=model) with the wrapped model, or MixedPrecisionManager(replicas=model); "
                "replicas=1 only where every rank trains a model of its own, in no wrapper",
            )

    def wrappers(self, model: nn.Module | None = None) -> list[Wrapper]:
        """The wrappers in a model; of all models met where it is None."""
        if model is not None:
            entry = self._met.get((id(model),))
            return [] if entry is None else entry[1].wrappers
        return list({id(w): w for _, layout in self._met.values() for w in layout.wrappers}.values())

    @property
    def sharded(self) -> bool:
        """Whether parameters here are parts of whole ones."""
        return any(wrapper.sharded for wrapper in self.wrappers())

    @property
    def lockstep(self) -> bool:
        """Whether every micro-batch is a collective: each rank has to run as many of them."""
        return any(wrapper.lockstep for wrapper in self.wrappers())

    # --- a group ---

    def open(self, share: Share, ids: Sequence[int] = (), room: int = 0) -> Opening:
        require_terms(share.weights or ())
        with self.answered("the counts of a group"):
            return open_group(share, self._links, ids, room)

    def share(self, agreed: tuple[Any, ...], **facts: Any) -> Share:
        """This replica's row. ``agreed``: settings that have to be alike on all."""
        return Share(rank=collectives.rank(), policy=fingerprint(repr((self.policy, *agreed))), **facts)

    def exchange_at(
        self,
        model: nn.Module | None,
        opening: Opening,
        weights: Sequence[tuple[float, ...]] | None,
        micro_batches: int,
    ) -> tuple[int | None, bool]:
        """The micro-batch in whose backward wrappers exchange gradients, and whether ``average`` has to, at the update.

        The last of positive weight: nothing is backpropagated for one of weight 0. Where a replica has none, no
        backward may wait for it.
        """
        wrappers = self.wrappers(model)
        if any(wrapper.lockstep for wrapper in wrappers):
            unlearned = any(isinstance(wrapper, Ddp) and wrapper.unlearned for wrapper in wrappers)
            return (0, True) if unlearned else (micro_batches - 1, False)
        if not wrappers and not self._met and (not opening.complete or opening.uneven):
            raise MisuseError(
                f"replicas have {sorted({s.micro_batches for s in opening.shares})} micro-batches in one group, or "
                "nothing supervised, and the model whose gradients they exchange is not known yet",
                "manager.groups(…, model=model) with the wrapped model",
            )
        if any(isinstance(wrapper, Ddp) and wrapper.unlearned for wrapper in wrappers):
            if opening.dry:
                raise UnsupportedError(
                    f"rank {opening.dry[0]} has no micro-batch in the first group of a static graph, which has to be "
                    "learnt on every rank alike",
                    "DistributedDataParallel(static_graph=False), or a first group in which every replica has one",
                )
            return 0, True
        if not wrappers or not opening.complete:
            return None, True
        if weights is None:
            if any(wrapper.compiled for wrapper in wrappers):  # whether zeros could be given is not known
                return None, True
            return micro_batches - 1, False
        return max(position for position, own in enumerate(weights) if any(own)), False

    def hold(self, model: nn.Module | None, exchange: bool, *, buffers: bool) -> None:
        for wrapper in self.wrappers(model):
            wrapper.hold(exchange, buffers)

    def free(self, model: nn.Module | None) -> None:
        for wrapper in self.wrappers(model):
            wrapper.free()

    def concerned(self, losses: Sequence[Tensor]) -> list[Wrapper]:
        """The wrappers a loss went through, of those whose backward is waited for: all of them where it is in none.

        Asked before the backward, whose graph is gone after it.
        """
        waiting = [wrapper for wrapper in self.wrappers() if wrapper.waited_for]
        if len(waiting) < 2:
            return waiting
        under = nodes(losses)
        return [wrapper for wrapper in waiting if wrapper.gives(under)] or waiting

    def done(self, concerned: Sequence[Wrapper]) -> None:
        """A backward has run through ``concerned``; others that are waited for still are."""
        with self.answered("buckets"):
            for wrapper in self.wrappers():
                if wrapper in concerned or not wrapper.waited_for:
                    wrapper.done()

    def nothing(self, losses: Sequence[Tensor], *, grouped: bool) -> None:
        if not grouped and not self.local and not self._met:
            raise MisuseError(
                "a contribution of weight 0 came before the wrapped model is known: other ranks may wait for it",
                "MixedPrecisionManager(replicas=model), or manager.groups(…, model=model)",
            )
        concerned = self.concerned(losses)
        with self.answered("gradients"):
            for wrapper in self.wrappers():
                if wrapper in concerned or not wrapper.waited_for:
                    wrapper.nothing()

    def forget(self, modules: Sequence[nn.Module] | None = None) -> None:
        """Contributions to these modules (None: all) are used or dropped."""
        for wrapper in self.wrappers() if modules is None else self._of(modules):
            wrapper.forget()

    def reference(self, first: float, micro_batches: int) -> float:
        """What W is about: a power of two near it, agreed upon once. A collective then; ``first`` 0: not known here."""
        if self.scale is None:
            rows = self.gather([collectives.bits(first * micro_batches)])
            most = max(collectives.number(row[0]) for row in rows)
            if most > 0.0:
                self.scale = 2.0 ** round(math.log2(most * self.degree))
        return self.scale or 1.0

    def close(
        self, mode: str, contributions: int, weights: Sequence[float] | None, *, empty: bool, local: bool, guessed: bool
    ) -> Closing:
        """W over all replicas; ``local``: gradients here have not been exchanged."""
        with self.answered("the counts of an update"):
            return close_group(
                collectives.rank(),
                mode,
                contributions,
                weights,
                empty=empty,
                local=local,
                guessed=guessed,
                links=self._links,
            )

    def _of(self, modules: Sequence[nn.Module]) -> list[Wrapper]:
        entry = self._met.get(tuple(map(id, modules)))
        return self.wrappers() if entry is None else entry[1].wrappers

    def exchanged(self, modules: Sequence[nn.Module]) -> bool:
        """Whether what is in the gradients of these modules here has been exchanged."""
        wrappers = self._of(modules)
        return bool(wrappers) and all(wrapper.exchanged or wrapper.sharded for wrapper in wrappers)

    def average(self, parameters: Sequence[Tensor]) -> None:
        with self.answered("gradients"):
            collectives.average(parameters, self._links)

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        with self.answered("counts"):
            return collectives.gather(row, self._links)

    def answered(self, what: str) -> AbstractContextManager[None]:
        """Other ranks have to take part in this: where one does not, say so. Every update before is in the journal."""
        return collectives.answered(what, self.settle)

    # --- the record ---

    def describe(self) -> dict[str, Any]:
        """For the record."""
        facts: dict[str, Any] = {"D": self.degree, "R": self.averaging, "backend": self.backend}
        if self.backend != "one process":
            facts |= {"inferred": self.how, "rank": collectives.rank(), "unverified": list(self.notes)}
            sharding = [wrapper.dtypes for wrapper in self.wrappers() if wrapper.sharded]
            facts |= {"sharding": sharding[0]} if sharding else {}
        return facts


def resolve(replicas: Any) -> Replicas:
    """``replicas`` as given to the manager: None, 1, a process group, a mesh of one dimension."""
    return replicas if isinstance(replicas, Replicas) else Replicas(replicas)


def fingerprint(words: str) -> int:
    """A policy as a number, the same in every process."""
    return zlib.crc32(words.encode())
