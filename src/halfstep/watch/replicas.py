"""Replicas: process groups, modules wrapped for data parallelism, and what each backward meant to them.

Only what lies in this process is looked at; no collective is ever started. Ranks are compared later, by their records.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import GroupMade, Place, ReplicaBackward, ReplicasMade
from halfstep.launch import stand_by
from halfstep.watch.modules import Modules
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users, place

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_DENSE = 256  # contributions told of each, then only where something is out of the ordinary
_NAMED = 12  # parameters named
_PROBED = 4  # parameters looked at to know whether a backward reached a module
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_AVERAGING = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")  # torch's hooks that keep the mean
_DATA = ("dp", "data", "fsdp", "shard", "replicate", "replica", "ddp", "hsdp")  # mesh dimensions that split the data


@dataclass(slots=True)
class _Wrapped:
    """A module in a DDP wrapper, since the backward before."""

    ref: weakref.ref[Any]
    ident: int
    ranks: tuple[int, ...]
    forwards: int = 0
    forward_at: Place | None = None
    synced: bool = True
    bypassed: weakref.ref[torch.nn.Module] | None = None
    bypassed_at: Place | None = None
    probes: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)
    hook: str | None = None


class Replicas:
    """``together``: this process is one of several that form a group."""

    def __init__(self, session: Session, modules: Modules) -> None:
        self._session = session
        self._modules = modules
        self._wrapped: dict[int, _Wrapped] = {}  # id(wrapper) -> what is known of it
        self._inside: dict[int, int] = {}  # id(module inside) -> id(wrapper)
        self._sharded: set[int] = set()
        self._told = 0
        self.together = False

    def install(self, patches: Patches) -> None:
        if not torch.distributed.is_available():
            return
        from torch.distributed import distributed_c10d
        from torch.nn.parallel import DistributedDataParallel

        patches.around(distributed_c10d, "init_process_group", None, self._after_group)
        patches.around(DistributedDataParallel, "__init__", None, self._after_wrap)
        patches.around(torch.autograd, "backward", self._before_backward, self._after_backward)
        if self._called not in self._modules.entries:
            self._modules.entries.append(self._called)
        self._modules.inner[DistributedDataParallel] = self._called_inside
        if torch.distributed.is_initialized():
            self._group(None)

    # -- groups and wrappers -------------------------------------------------------------------------------------

    def _after_group(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        method = kwargs.get("init_method", args[1] if len(args) > 1 else None)
        self._group(method if isinstance(method, str) else None)

    def _group(self, method: str | None) -> None:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if method is None or method.startswith("env:"):
            method = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        method = re.sub(r"[?&]rank=\d+", "", method)
        where = f"{method} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        backend = str(torch.distributed.get_backend())
        self._session.joined(rank, size, where)
        self._session.stream.emit(
            GroupMade, at=self._session.place(), rank=rank, world_size=size, backend=backend, where=where
        )
        if size > 1:
            self.together = True
            stand_by()

    def _after_wrap(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapper = args[0]
        if id(wrapper) in self._wrapped and self._wrapped[id(wrapper)].ref() is wrapper:
            return
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(wrapper.process_group)))
        ident = self._session.ident("module", wrapper)
        self._wrapped[id(wrapper)] = _Wrapped(weakref.ref(wrapper), ident, ranks)
        for module in wrapper.module.modules():
            self._inside[id(module)] = id(wrapper)
        self._session.stream.emit(
            ReplicasMade,
            at=self._session.place(),
            module=ident,
            how="ddp",
            type=type(wrapper.module).__name__,
            ranks=ranks,
            unused="found" if wrapper.find_unused_parameters else "static" if wrapper.static_graph else None,
        )

    def owner(self, module: torch.nn.Module) -> tuple[int, ...]:
        """The ranks that hold a replica of this wrapper; empty for any other module."""
        known = self._wrapped.get(id(module))
        return known.ranks if known is not None and known.ref() is module else ()

    # -- forwards ------------------------------------------------------------------------------------------------

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any, at: Place | None) -> None:
        if not self.together or not torch.is_grad_enabled():
            return
        module = getattr(module, "_orig_mod", module)  # what a compiled module wraps
        known = self._wrapped.get(id(module))
        if known is not None and known.ref() is module:
            self._forward(known, module, at)
            return
        wrapper = self._inside.get(id(module))
        if wrapper is not None:
            known = self._wrapped[wrapper]
            if known.bypassed is None or known.bypassed() is None:
                known.bypassed, known.bypassed_at = weakref.ref(module), self._from_outside() or at
            return
        self._see_sharded(module, at)

    def _from_outside(self) -> Place | None:
        """The user's line that led into a wrapped module: past the methods of the module itself and its parts."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if is_users(code):
                own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
                if not isinstance(own, torch.nn.Module) or id(own) not in self._inside:
                    return place(frame)
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def _called_inside(self, module: torch.nn.Module) -> None:
        known = self._wrapped.get(id(module))
        if known is not None and self.together and torch.is_grad_enabled():
            self._forward(known, module, self._session.place())

    def _forward(self, known: _Wrapped, module: Any, at: Place | None) -> None:
        known.forwards += 1
        known.forward_at = at
        known.synced = bool(module.require_backward_grad_sync)

    def _see_sharded(self, module: torch.nn.Module, at: Place | None) -> None:
        """A root whose parameters are spread over a mesh, or flattened by the first FSDP."""
        ident = self._session.ident("module", module)
        if ident in self._sharded:
            return
        self._sharded.add(ident)
        kinds = {k.__name__ for m in module.modules() for k in type(m).__mro__}
        if not kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            return
        how = "fsdp" if "FSDPModule" in kinds else "fsdp1"
        self._session.stream.emit(
            ReplicasMade, at=at, module=ident, how=how, type=type(module).__name__, ranks=_spread_over(module)
        )

    # -- backwards -----------------------------------------------------------------------------------------------

    def _before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.together or torch._C._current_graph_task_id() != -1:
            return
        for known in self._living():
            bypassed = known.bypassed() if known.bypassed is not None and not known.forwards else None
            known.probes = [] if bypassed is None else [_state(p) for p in _some(bypassed.parameters())]

    def _after_backward(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.together or torch._C._current_graph_task_id() != -1:
            return
        for known in self._living():
            if known.forwards or known.probes:
                self._tell(known, known.ref())
            known.forwards, known.bypassed, known.bypassed_at, known.probes = 0, None, None, []

    def _tell(self, known: _Wrapped, wrapper: Any) -> None:
        reached = known.forwards > 0 or any(_state(p)[1:] != (old, version) for p, old, version in known.probes)
        if not reached:
            return
        synced = bool(wrapper.require_backward_grad_sync)
        reduced = known.forwards > 0 and known.synced
        missing = self._missing(wrapper) if reduced else []
        ordinary = known.forwards > 0 and known.synced == synced and not missing
        self._told += 1
        if ordinary and self._told > _DENSE:
            return
        if wrapper._comm_hooks and known.hook is None:
            self._see_hook(known, wrapper)
        self._session.stream.emit(
            ReplicaBackward,
            at=self._session.place(),
            contribution=self._session.stream.micro,
            module=known.ident,
            optimizers=self._modules.owners(wrapper),
            ranks=known.ranks,
            reduced=reduced,
            forwards=known.forwards,
            forward_at=known.forward_at if known.forwards else None,
            forward_synced=known.synced,
            backward_synced=synced,
            bypassed_at=known.bypassed_at if known.probes else None,
            missing=tuple(missing[:_NAMED]),
            missing_count=len(missing),
        )

    def _missing(self, wrapper: Any) -> list[str]:
        """Parameters whose gradient the wrapper still waits for: torch would raise in the next forward."""
        try:
            wrapper.reducer._check_reducer_finalized()
        except RuntimeError as error:
            return missing_of(wrapper, str(error))
        return []

    def _see_hook(self, known: _Wrapped, wrapper: Any) -> None:
        hooks = [getattr(h, "__name__", type(h).__name__) for h, _ in wrapper._comm_hooks]
        known.hook = ", ".join(hooks)
        self._session.stream.emit(
            ReplicasMade,
            module=known.ident,
            type=type(wrapper.module).__name__,
            ranks=known.ranks,
            averages=all(h in _AVERAGING for h in hooks),
            hook=known.hook,
        )

    def _living(self) -> Iterable[_Wrapped]:
        for key, known in list(self._wrapped.items()):
            if known.ref() is None:
                del self._wrapped[key]
                self._inside = {m: w for m, w in self._inside.items() if w != key}
            else:
                yield known


def missing_of(wrapper: Any, message: str) -> list[str]:
    """The names of the parameters that torch's exception lists by number."""
    found = _INDICES.search(message)
    if found is None:
        return ["some parameters"]
    names = {id(p): n for n, p in wrapper.module.named_parameters()}
    wrapped = [p for p in wrapper._module_parameters if p.requires_grad]
    numbers = [int(n) for n in found[1].split()]
    gone = "one that the module lost since it was wrapped"
    return [names.get(id(wrapped[n]), gone) if n < len(wrapped) else f"parameter {n}" for n in numbers]


def _state(parameter: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    grad = parameter.grad
    return (parameter, 0, 0) if grad is None else (parameter, id(grad), grad._version)


def _some(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in parameters if p.requires_grad][:_PROBED]


def _spread_over(module: torch.nn.Module) -> tuple[int, ...]:
    """The ranks that see other examples than this one; empty where it cannot be told."""
    known = [m for p in module.parameters() if (m := getattr(p, "device_mesh", None)) is not None]
    meshes = {(tuple(m.mesh.flatten().tolist()), m.mesh_dim_names): m for m in known}
    if not meshes:
        return tuple(range(torch.distributed.get_world_size()))
    mesh = next(iter(meshes.values()))
    if len(meshes) > 1:
        return ()
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    if mesh.ndim > 1 and not all(any(word in name.lower() for word in _DATA) for name in names):
        return ()  # some dimensions may split the model
    return tuple(sorted(int(r) for r in mesh.mesh.flatten().tolist()))
