"""The calls of root modules in the group that runs: references, not copies, so that one can be made again.

What became of a micro-batch is known only after the attempt. Until then its inputs are kept (detached, so that no
graph is), with the random state and the autocast state of the call: at most `_CALLS` calls and `_BYTES` bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from halfstep.events import Place
from halfstep.watch.modules import Modules
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_CALLS = 16
_BYTES = 64 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)


class Opaque(Exception):  # noqa: N818
    """An argument is an object of the script's own: it may hold a graph, or change."""


class Call:
    """One call of a root module with gradients on.

    ``gradients``: those that arrived at its outputs, by their position, once `Calls.arm` was called (else empty).
    ``explained``: a replay has shown what went wrong in it.
    """

    __slots__ = (
        *("_args", "_kwargs", "_kept", "at", "autocast", "explained", "gradients"),
        *("micro", "module", "random", "size", "training"),
    )

    def __init__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], at: Place | None, micro: int
    ) -> None:
        self._kept: list[
            tuple[torch.Tensor, int, bool]
        ] = []  # a tensor without its graph, its version, needs gradients
        self.size = 0
        self._args = self._keep(args)
        self._kwargs = self._keep(kwargs) if kwargs else {}
        self.module = weakref.ref(module)
        self.training = module.training
        self.at = at
        self.micro = micro
        self.random = random_state()
        self.autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices()}
        self.gradients: dict[int, torch.Tensor] = {}
        self.explained = False

    def _keep(self, value: Any) -> Any:
        """The same structure with the number of each tensor in its place."""
        if isinstance(value, torch.Tensor):
            self._kept.append((value.detach(), 0 if value.is_inference() else value._version, value.requires_grad))
            self.size += value.nbytes
            return _Slot(len(self._kept) - 1)
        if type(value) in (tuple, list):
            return type(value)(map(self._keep, value))
        if type(value) is dict:
            return {k: self._keep(v) for k, v in value.items()}
        if isinstance(value, _PLAIN):
            return value
        raise Opaque

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments as they were, requiring gradients where they did; None where one was overwritten since."""
        if any(not t.is_inference() and t._version != version for t, version, _ in self._kept):
            return None
        tensors = [t.detach().requires_grad_(needs) for t, _, needs in self._kept]
        return _filled(self._args, tensors), _filled(self._kwargs, tensors)


class _Slot(int):
    """Where a tensor stood."""


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    if type(value) is _Slot:
        return tensors[value]
    if type(value) in (tuple, list):
        return type(value)(_filled(v, tensors) for v in value)
    if type(value) is dict:
        return {k: _filled(v, tensors) for k, v in value.items()}
    return value


class Calls:
    def __init__(self, session: Session, modules: Modules) -> None:
        self._session = session
        self._modules = modules
        self._kept: list[Call] = []
        self._former: list[Call] = []  # of the group before, where what became of it is known late
        self._updates = 0
        self._armed = 0

    def install(self, patches: Patches) -> None:
        if self._called not in self._modules.entries:
            self._modules.entries.append(self._called)
            self._modules.exits.append(self._returned)

    def remove(self) -> None:
        self.clear()

    def recent(self) -> Iterator[Call]:
        """The calls kept, the last first."""
        yield from reversed([*self._former, *self._kept])

    def clear(self) -> None:
        self._kept, self._former = [], []

    def arm(self, calls: int = 64) -> None:
        """Keep what arrives at the outputs of the next calls, so that their backward can be made again."""
        self._armed = max(self._armed, calls)

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any, at: Place | None) -> None:
        if not torch.is_grad_enabled():
            return
        updates = self._session.look.updates
        if updates != self._updates:  # a new group
            late = any(v.device.type != "cpu" for v in module.parameters())
            self._updates, self._former, self._kept = updates, self._kept if late else [], []
        try:
            call = Call(module, args, kwargs, at, self._session.stream.micro)
        except Opaque:
            return
        self._kept.append(call)
        while len(self._kept) > _CALLS or (len(self._kept) > 1 and sum(c.size for c in self._kept) > _BYTES):
            del self._kept[0]
        if call.size > _BYTES:
            self._kept.clear()

    def _returned(self, module: torch.nn.Module, result: Any) -> None:
        if not self._armed or not self._kept or self._kept[-1].module() is not module:
            return
        self._armed -= 1
        call = self._kept[-1]
        for index, output in enumerate(outputs_of(result)):
            if output.requires_grad and output.numel() > 1:
                output.register_hook(_keeping(call.gradients, index))  # type: ignore[no-untyped-call]


def _keeping(gradients: dict[int, torch.Tensor], index: int) -> Any:
    def keep(gradient: torch.Tensor) -> None:
        known = gradients.get(index)
        gradients[index] = gradient.detach() if known is None else known + gradient.detach()

    return keep


def outputs_of(result: Any) -> list[torch.Tensor]:
    """The tensors a module returned, in order."""
    return [v for v in tree_flatten(result)[0] if isinstance(v, torch.Tensor)]


def devices() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if device is None else ("cpu", device.type)


def random_state() -> list[torch.Tensor]:
    """States of torch's generators, the host's first."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
