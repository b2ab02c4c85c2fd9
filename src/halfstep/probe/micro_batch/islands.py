"""The smallest part that must be FP32: modules, found one culprit after the other, or one line's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from halfstep.engine.island import keep_fp32
from halfstep.events import Place
from halfstep.probe.micro_batch.comparison import Comparison
from halfstep.watch.exact import widened
from halfstep.watch.place import place

MOST = 8  # modules: a model that needs more wants BF16


def smallest_island(
    model: nn.Module, found: Comparison, again: Callable[[], Comparison]
) -> tuple[tuple[str, ...], Comparison] | None:
    """The modules to keep in FP32, and the comparison with them so; None where no module inside is at fault.

    The module at fault is made an island; where the trouble moves on to another module, that one too; where it stays,
    the one before it, whose half-precision output may be what is wrong. Then each is left out again, to see whether it
    is needed. At most `MOST`; the comparison tells whether it was enough.
    """
    names: list[str] = []
    after = found
    while after.to_blame is True and len(names) < MOST:
        suspect = after.suspect
        if not suspect or _covered(suspect, names):
            suspect = _before(found, names) if names else None
        if not suspect:
            break
        names = [n for n in names if not n.startswith(f"{suspect}.")] + [suspect]
        after = _with(model, names, again)
    if not names:
        return None
    if after.to_blame is not True:
        for name in list(names):
            fewer = [n for n in names if n != name]
            without = _with(model, fewer, again) if fewer else found
            if without.to_blame is not True:
                names, after = fewer, without
    return tuple(names), after


def _covered(name: str, names: list[str]) -> bool:
    return any(name == n or name.startswith(f"{n}.") for n in names)


def _before(found: Comparison, names: list[str]) -> str | None:
    """The module in half precision that ran before those: what they are given may be rounded already."""
    halves = [m for m in found.modules if m.name and m.dtype != "float32" and m.weights is not None]
    first = min((m.order for m in found.modules if m.name in names), default=0)
    earlier = [m for m in halves if m.order < first and not _covered(m.name, names)]
    return max(earlier, key=lambda m: m.order).name if earlier else None


def _with(model: nn.Module, names: list[str], again: Callable[[], Comparison]) -> Comparison:
    backward = functorch_config.backward_pass_autocast
    islands = keep_fp32(model, *names)
    try:
        return again()
    finally:
        islands.remove()
        functorch_config.backward_pass_autocast = backward


class Region(TorchFunctionMode):
    """While it is on, what this line of the user's asks of torch is computed in FP32, on FP32 inputs."""

    def __init__(self, at: Place, device: str) -> None:
        super().__init__()
        self._at = (at.file, at.line)
        self._kind = torch.device(device).type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = None if func.__name__ == "__get__" else place()  # what a tensor is, is no operator
        if here is None or (here.file, here.line) != self._at:
            return func(*args, **(kwargs or {}))
        with torch.autocast(self._kind, enabled=False):
            return func(*tree_map(widened, args), **tree_map(widened, kwargs or {}))
