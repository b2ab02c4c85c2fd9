"""Checkpoints: saved, and loaded into modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import StateLoaded, StateSaved
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session


class States:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._depth = 0

    def install(self, patches: Patches) -> None:
        patches.around(torch, "save", None, self._after_save)
        patches.around(torch, "load", None, self._after_read)
        patches.around(torch.nn.Module, "load_state_dict", None, self._after_load)

    def _after_save(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        thing = kwargs.get("obj", args[0] if args else None)
        self._session.stream.emit(StateSaved, at=self._session.place(), has=tuple(sorted(found(thing))))

    def _after_read(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for kind in sorted(found(result)):
            at = self._session.place()
            self._session.stream.emit(StateLoaded, at=at, kind=f"file with {kind}", numbers=numbers(result))

    def _after_load(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ident = self._session.ident("module", args[0])
        self._session.stream.emit(StateLoaded, at=self._session.place(), kind="module", ident=ident)


def found(thing: Any, depth: int = 0) -> set[str]:
    """What a saved object holds, told by the shape of its dictionaries."""
    if isinstance(thing, torch.nn.Module):
        return {"module"}
    if not isinstance(thing, Mapping):
        return set()
    keys = {k for k in thing if isinstance(k, str)}
    if {"param_groups", "state"} <= keys:
        return {"optimizer"}
    if {"scale", "_growth_tracker"} <= keys:
        return {"scaler"}
    if "last_epoch" in keys:
        return {"scheduler"}
    if keys and all(isinstance(v, torch.Tensor) for v in thing.values()):
        return {"module"}
    out: set[str] = set()
    if depth < 3:
        for value in thing.values():
            out |= found(value, depth + 1)
    return out


def numbers(thing: Any) -> tuple[float, ...]:
    """The plain floats among the entries of a saved object, at most 32."""
    if not isinstance(thing, Mapping):
        return ()
    return tuple(float(v) for v in thing.values() if isinstance(v, float))[:32]
