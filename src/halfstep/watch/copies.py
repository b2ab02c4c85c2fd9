"""Autocast's copies of weights: whether one was used although its weight had changed since it was made.

A copy lives until the outermost region is left. The graph of a backward tells which copies its forward used; a look
tells it of forwards without one (a reference model whose weights were swapped in, say).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.events import Place, StaleCasts
from halfstep.watch.autocasts import HALF, Autocasts, Region
from halfstep.watch.casts import PRODUCTS
from halfstep.watch.look import Operation
from halfstep.watch.modules import Modules
from halfstep.watch.patches import Patches
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_NODES = 50_000  # of a graph, looked through for casts of weights
_WEIGHTS = 64  # whose copies are compared
_ELEMENTS = 16  # of each
_DENSE = 8  # backwards of one region that are looked at, then those numbered 2^k


class _Made(NamedTuple):
    """A copy seen being made: its memory, its weight and what that was, the forward in which."""

    storage: Any
    weight: weakref.ref[torch.Tensor]
    sample: torch.Tensor
    forward: int


class _Here(threading.local):
    """What one thread knows of the copies in the region that it is in."""

    def __init__(self) -> None:
        self.forwards = 0
        self.enter(None)

    def enter(self, region: Region | None) -> None:
        self.region = region
        self.backwards = 0
        self.before = 0  # sequence number at the backward before: what has a higher one was computed since
        self.seen: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}  # sequence number of the cast
        self.made: dict[int, _Made] = {}  # address of the copy
        self.flags: list[torch.Tensor] = []  # whether a copy that was used had gone stale
        self.at: Place | None = None


class Copies:
    def __init__(self, session: Session, autocasts: Autocasts, modules: Modules) -> None:
        self._session = session
        self._autocasts = autocasts
        self._modules = modules
        self._here = _Here()

    def install(self, patches: Patches) -> None:
        patches.around(torch.autograd, "backward", self._before)
        patches.around(torch.autograd, "grad", self._before)
        if self not in self._session.look.lenses:
            self._session.look.lenses.append(self)
            self._modules.entries.append(self._called)

    def _now(self) -> _Here | None:
        """What is known in the outermost region open; None outside of any."""
        here, stack = self._here, self._autocasts.stack
        if not stack:
            return None
        if here.region is not stack[0]:
            self._tell()
            here.enter(stack[0])
        return here

    # -- by the graph of a backward ------------------------------------------------------------------------------

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        here = self._now()
        if here is None or torch._C._current_graph_task_id() != -1:
            return
        self._tell()
        here.backwards += 1
        before, here.before = here.before, torch.autograd._get_sequence_nr()
        number = self._session.stream.micro + 1 if here.backwards == 1 else here.backwards
        if number > _DENSE and number & (number - 1):
            return
        roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        for sequence, used, weight in _cast_weights([roots] if isinstance(roots, torch.Tensor) else roots):
            known = here.seen.get(sequence)
            if known is None or known[0]() is not weight:
                here.seen[sequence] = (weakref.ref(weight), _sample(weight).clone())
            elif used >= before and len(here.flags) < _WEIGHTS:
                here.flags.append((known[1] != _sample(weight)).any())
        self._tell()

    def _tell(self) -> None:
        here = self._here
        flags, here.flags = here.flags, []
        if here.region is not None and flags and len({f.device for f in flags}) == 1:
            self._session.stream.emit(
                StaleCasts,
                at=here.at or self._session.place(),
                region=here.region.ident,
                entered_at=here.region.at,
                casts=len(flags),
                changed=Late(torch.stack(flags).any(), bool),
                backwards=here.backwards,
            )
        here.at = None

    # -- by looking ----------------------------------------------------------------------------------------------

    def _called(self, module: Any, args: Any, kwargs: Any, at: Place | None) -> None:
        """A forward begins: copies that earlier ones made are compared when it uses them."""
        self._here.forwards += 1
        if self._here.flags:
            with torch.no_grad():
                self._tell()

    def before(self, operation: Operation) -> None: ...

    def after(self, operation: Operation) -> None:
        here = self._now()
        if here is None or torch._C._current_autograd_node() is not None:
            return
        if operation.name == "_to_copy":
            weight, out = operation.args[0], operation.out
            if weight.is_leaf and weight.requires_grad and out.dtype in HALF and weight.dtype is torch.float32:
                storage = StorageWeakRef(out.untyped_storage())  # type: ignore[no-untyped-call]
                made = _Made(storage, weakref.ref(weight), _sample(weight).clone(), here.forwards)
                here.made[_address(out)] = made
        elif here.made and operation.name in PRODUCTS and len(here.flags) < _WEIGHTS:
            for tensor in operation.tensors():
                known = here.made.get(_address(tensor)) if tensor.dtype in HALF else None
                if known is None or known.forward == here.forwards or known.storage.expired():
                    continue
                weight = known.weight()
                if weight is not None:
                    here.flags.append((known.sample != _sample(weight)).any())
                    here.at = operation.at


def _cast_weights(roots: Any) -> list[tuple[int, int, torch.Tensor]]:
    """The leaves that the graph of these roots reaches through a cast.

    Each with the sequence number of the cast, and the highest one of an operator that used it.
    """
    queue: list[Any] = [r.grad_fn for r in roots or () if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    seen = set(queue)
    casts: dict[Any, tuple[int, torch.Tensor]] = {}
    used: dict[Any, int] = {}
    for node in queue:
        for other, _ in node.next_functions:
            if other is None:
                continue
            if other.name().startswith("ToCopy"):
                used[other] = max(used.get(other, 0), node._sequence_nr())
            leaf = getattr(other, "variable", None)
            if isinstance(leaf, torch.Tensor):
                if node.name().startswith("ToCopy"):
                    casts[node] = (node._sequence_nr(), leaf)
            elif other not in seen and len(queue) < _NODES:
                seen.add(other)
                queue.append(other)
    return [(sequence, used.get(node, 0), leaf) for node, (sequence, leaf) in casts.items()]


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some elements, spread evenly: a view where the memory is in one piece."""
    weight = weight.detach()
    flat = weight.view(-1) if weight.is_contiguous() else weight[(0,) * (weight.dim() - 1)]
    return flat[:: max(1, flat.numel() // _ELEMENTS)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
