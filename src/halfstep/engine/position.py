"""Where a run is in its data, and how a new process gets there again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from halfstep.engine.group import examples_of
from halfstep.errors import PolicyError


class Position:
    """Epoch and micro-batches used in it, with the random state the epoch's order came from.

    An order drawn by ``shuffle=True`` comes from torch's CPU generator, or from the loader's own, as it stood when the
    epoch began. Both are remembered then, and put back before a resumed epoch begins; the micro-batches used before
    are drawn and dropped, and the generators are set to where the save found them.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.micro_batches = 0
        self.examples: int | None = 0
        """Of those micro-batches, on this replica; None where their sizes are not known."""
        self.size = 0
        """Micro-batches of a full group."""
        self.degree = 1
        """Replicas that share the epoch."""
        self.exhausted = False
        """Whether the loader has said that it is at its end: samplers draw once more then."""
        self._start: dict[str, Any] | None = None
        self._loader: Any = None
        self._resume: dict[str, Any] | None = None

    def begin(self, loader: Iterable[Any], size: int, degree: int) -> tuple[Iterator[Any], int]:
        """Begin an epoch, or go on with the one that was loaded: (iterator, micro-batches already used)."""
        resume, self._resume = self._resume, None
        if resume is None and self.micro_batches:
            self.end()  # the last pass was left early; a new one is a new epoch
        before, (self.size, self.degree) = (self.size, self.degree), (size, degree)
        self._loader = loader
        if resume is None or _resumes_itself(loader):
            self._start = _state_of(loader)
            return iter(loader), self.micro_batches
        if self.micro_batches:
            _restore(loader, resume["start"])
        else:
            _restore(loader, resume["now"])
        self._start = _state_of(loader)
        iterator = iter(loader)
        if not self.micro_batches:
            return iterator, 0
        if before in ((size, degree), (0, 1)):  # (0, 1): saved by a version that did not tell
            self._draw(iterator)
        else:
            self._draw_examples(iterator, before)
        if resume["exhausted"]:
            next(iterator, None)
        _restore(loader, resume["now"])
        return iterator, self.micro_batches

    def _draw(self, iterator: Iterator[Any]) -> None:
        """Draw and drop the micro-batches used: the split is the one the state was saved with."""
        examples: int | None = 0
        for drawn in range(self.micro_batches):
            batch = next(iterator, self)
            if batch is self:
                raise PolicyError(
                    f"the run had used {self.micro_batches} micro-batches of this epoch, the loader gave only {drawn}",
                    "resume with the loader the state was saved with (same data, batch size and sampler)",
                )
            examples = _added(examples, examples_of(batch))
        if None not in (examples, self.examples) and examples != self.examples:
            raise PolicyError(
                f"the {self.micro_batches} micro-batches the run had used of this epoch had {self.examples} examples, "
                f"those the loader gives now have {examples}",
                "resume with the loader the state was saved with; with another batch size choose the size of groups so "
                "that an update has as many examples as before",
            )

    def _draw_examples(self, iterator: Iterator[Any], before: tuple[int, int]) -> None:
        """Draw and drop as many *examples*, over all replicas, as were used under another split."""
        was, now = (f"A = {size}, D = {degree}" for size, degree in (before, (self.size, self.degree)))
        fix = (
            "resume with the split the state was saved with, or one that divides the same examples; "
            "load_state_dict(state, position=False) for a loader that you restore"
        )
        if self.examples is None:
            raise PolicyError(
                f"the state was saved with {was} and is continued with {now}, and the number of examples of its "
                f"{self.micro_batches} micro-batches is not known: the place in the epoch cannot be found",
                fix,
            )
        used, drawn, count = self.examples * before[1], 0, 0
        while drawn * self.degree < used:
            batch = next(iterator, self)
            size = None if batch is self else examples_of(batch)
            if size is None:
                ended = "the loader ended" if batch is self else "the examples of a micro-batch cannot be counted"
                raise PolicyError(
                    f"the run had used {used} examples of this epoch (with {was}); {ended} after {drawn} on each of "
                    f"{self.degree} replicas",
                    fix,
                )
            drawn, count = drawn + size, count + 1
        if drawn * self.degree != used:
            raise PolicyError(
                f"the run had used {used} examples of this epoch (with {was}); micro-batches of {size} on each of "
                f"{self.degree} replicas reach {drawn * self.degree}, not {used}",
                fix,
            )
        self.micro_batches, self.examples = count, drawn

    def used(self, micro_batches: int, examples: int | None) -> None:
        """A group has been stepped."""
        self.micro_batches += micro_batches
        self.examples = _added(self.examples, examples)

    def epoch_of(self, begun: bool) -> int:
        """The epoch under way, or the one that ``begin`` would begin: a pass that was left early is over then."""
        left_early = not begun and self._resume is None and self.micro_batches > 0
        return self.epoch + left_early

    def end(self) -> None:
        self.epoch += 1
        self.micro_batches = self.examples = 0
        self.exhausted = False

    def state(self) -> dict[str, Any]:
        """The same keys at any time, and generators in tuples: what a distributed checkpoint takes for one leaf."""
        return {
            "epoch": self.epoch,
            "micro_batches": self.micro_batches,
            "examples": self.examples,
            "size": self.size,
            "degree": self.degree,
            "exhausted": self.exhausted,
            "start": (self._start,) if self.micro_batches else (),
            "now": () if self._loader is None else (_state_of(self._loader),),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.micro_batches = int(state["micro_batches"])
        self.examples = state.get("examples")
        self.size, self.degree = state.get("size", 0), state.get("degree", 1)
        self.exhausted = bool(state["exhausted"])
        self._resume = {**state, "start": _one(state["start"]), "now": _one(state["now"])}
        self._start = self._resume["start"]


def _one(kept: Any) -> Any:
    """What a tuple of at most one holds; states of version 1 held it bare."""
    return (kept[0] if kept else None) if isinstance(kept, (tuple, list)) else kept


def _added(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


def _resumes_itself(loader: Any) -> bool:
    """A loader with a state of its own (torchdata's StatefulDataLoader) is the user's to restore."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def generators_of(loader: Any) -> list[torch.Generator]:
    """The loader's own generators: its, its sampler's, its batch sampler's, once each."""
    found: list[torch.Generator] = []
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def _state_of(loader: Any) -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "loader": [g.get_state() for g in generators_of(loader)]}


def _restore(loader: Any, state: dict[str, Any] | None) -> None:
    if state is None:
        return
    torch.set_rng_state(state["torch"].cpu())  # loaded with a map_location, it may lie on a device
    for generator, value in zip(generators_of(loader), state["loader"], strict=False):
        generator.set_state(value.cpu())


def random_state() -> dict[str, Any]:
    """Every generator a training script draws from: torch's, the accelerator's, Python's, NumPy's where loaded."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        module = getattr(torch, accelerator.type, None) if accelerator is not None else None
        if module is not None and hasattr(module, "get_rng_state_all"):
            state["accelerator"] = module.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.copy()), *rest]
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "accelerator" in state and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        module = getattr(torch, accelerator.type, None) if accelerator is not None else None
        if module is not None and hasattr(module, "set_rng_state_all"):
            module.set_rng_state_all([value.cpu() for value in state["accelerator"]])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.cpu().numpy(), *rest))
