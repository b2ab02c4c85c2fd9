"""Where a run is in its data, and how a new process gets there again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

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
        self.exhausted = False
        """Whether the loader has said that it is at its end: samplers draw once more then."""
        self._start: dict[str, Any] | None = None
        self._loader: Any = None
        self._resume: dict[str, Any] | None = None

    def begin(self, loader: Iterable[Any]) -> tuple[Iterator[Any], int]:
        """Begin an epoch, or go on with the one that was loaded: (iterator, micro-batches already used)."""
        resume, self._resume = self._resume, None
        if resume is None and self.micro_batches:
            self.end()  # the last pass was left early; a new one is a new epoch
        taken = self.micro_batches
        self._loader = loader
        if resume is None or _resumes_itself(loader):
            self._start = _state_of(loader)
            return iter(loader), taken
        if taken:
            _restore(loader, resume["start"])
        else:
            _restore(loader, resume["now"])
        self._start = _state_of(loader)
        iterator = iter(loader)
        for drawn in range(taken):
            if next(iterator, self) is self:
                raise PolicyError(
                    f"the run had used {taken} micro-batches of this epoch, the loader gave only {drawn}",
                    "resume with the loader the state was saved with (same data, batch size and sampler)",
                )
        if resume["exhausted"]:
            next(iterator, None)
        if taken:
            _restore(loader, resume["now"])
        return iterator, taken

    def epoch_of(self, begun: bool) -> int:
        """The epoch under way, or the one that ``begin`` would begin: a pass that was left early is over then."""
        left_early = not begun and self._resume is None and self.micro_batches > 0
        return self.epoch + left_early

    def end(self) -> None:
        self.epoch += 1
        self.micro_batches = 0
        self.exhausted = False

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "micro_batches": self.micro_batches,
            "exhausted": self.exhausted,
            "start": self._start if self.micro_batches else None,
            "now": None if self._loader is None else _state_of(self._loader),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"])
        self.micro_batches = int(state["micro_batches"])
        self.exhausted = bool(state["exhausted"])
        self._start = state["start"]
        self._resume = dict(state)


def _resumes_itself(loader: Any) -> bool:
    """A loader with a state of its own (torchdata's StatefulDataLoader) is the user's to restore."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _generators(loader: Any) -> list[torch.Generator]:
    """The loader's own generators: its, its sampler's, its batch sampler's, once each."""
    found: list[torch.Generator] = []
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def _state_of(loader: Any) -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "loader": [g.get_state() for g in _generators(loader)]}


def _restore(loader: Any, state: dict[str, Any] | None) -> None:
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    for generator, value in zip(_generators(loader), state["loader"], strict=False):
        generator.set_state(value)


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
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "accelerator" in state and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        module = getattr(torch, accelerator.type, None) if accelerator is not None else None
        if module is not None and hasattr(module, "set_rng_state_all"):
            module.set_rng_state_all(state["accelerator"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.numpy(), *rest))
