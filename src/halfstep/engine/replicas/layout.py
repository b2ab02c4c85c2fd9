"""Who the replicas are, read from a model's wrappers: D, R, and the process groups that reach them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from halfstep.engine.replicas import collectives, fsdp, sharded
from halfstep.engine.replicas.collectives import Link
from halfstep.engine.replicas.wrappers import Ddp, Wrapper
from halfstep.errors import MisuseError, PolicyError, UnsupportedError

_MEANS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "ALLREDUCE", "FP16_COMPRESS")


@dataclass(slots=True)
class Layout:
    """``links`` reach the ranks whose gradients are averaged; empty: there are none."""

    degree: int = 1
    averaging: float = 1
    links: tuple[Link, ...] = ()
    wrappers: list[Wrapper] = field(default_factory=list)
    backend: str = "one process"
    how: str = "not distributed"
    notes: list[str] = field(default_factory=list)


def declared_link(replicas: Any) -> Link | None:
    """``replicas`` as given to the manager -> a process group, or None."""
    if replicas is None:
        return None
    if isinstance(replicas, int):
        raise PolicyError(
            f"replicas={replicas}: a number says how many, not how to reach them",
            "leave it out (the model shows them), or give their process group; replicas=1 only where every rank trains "
            "a model of its own, in no wrapper",
        )
    if collectives.initialised():
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(replicas, dist.ProcessGroup):
            return replicas
        if isinstance(replicas, DeviceMesh):
            if replicas.ndim != 1:
                raise PolicyError(
                    f"replicas is a mesh of {replicas.ndim} dimensions, {replicas.mesh_dim_names}",
                    'one of its dimensions: mesh["dp"]',
                )
            return replicas.get_group()
    raise UnsupportedError(
        f"replicas={replicas!r} is of type {type(replicas).__name__}",
        "None, a process group, or a mesh dimension like mesh['dp']; 1 where every rank trains a model of its own",
    )


def infer(modules: Sequence[nn.Module], declared: Link | None, known: Sequence[Wrapper]) -> Layout:
    """Look through a model for what exchanges its gradients. ``known``: wrappers of models seen before."""
    wrappers: list[Wrapper] = []
    for module in fsdp.roots(modules):
        seen = next((w for w in known if w.module is module), None)
        wrappers.append(fsdp.Fsdp(module) if seen is None else seen)
    for module in dict.fromkeys(inner for root in modules for inner in root.modules()):
        seen = next((w for w in known if w.module is module), None)
        if seen is not None:
            if seen not in wrappers:
                wrappers.append(seen)
        elif isinstance(module, DistributedDataParallel):
            wrappers.append(Ddp(module))
        elif isinstance(module, DataParallel):
            raise UnsupportedError(
                "the model is wrapped in DataParallel: it splits each micro-batch over cards inside one process and "
                "returns the outputs, so that a replica's own weights cannot be told",
                "DistributedDataParallel under torchrun, one process a card",
            )
        elif type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "the model is wrapped in FullyShardedDataParallel, whose flat parameters have no names or norms of "
                "their own",
                "torch.distributed.fsdp.fully_shard(model) (FSDP2)",
            )
    if not wrappers:
        covering = [w for w in known if _covers(w, modules)]
        wrappers = covering[:1]
    if not wrappers:
        return _unwrapped(modules, declared)
    return _wrapped(modules, wrappers, declared)


def require_unwrapped(modules: Sequence[nn.Module]) -> None:
    """Refuse a model whose gradients are exchanged with other ranks, where ``replicas=1`` was declared: D would be 1
    while its wrapper averages."""
    wrappers: list[Wrapper] = [fsdp.Fsdp(module) for module in fsdp.roots(modules)]
    wrappers += [
        Ddp(inner) for root in modules for inner in root.modules() if isinstance(inner, DistributedDataParallel)
    ]
    for wrapper in wrappers:
        wrapper.remove()
    shared = next((wrapper for wrapper in wrappers if wrapper.members > 1), None)
    if shared is not None:
        raise MisuseError(
            f"replicas=1, but the model is in {_words(shared)}, which averages gradients over all of them",
            "leave replicas= out: the model shows them; replicas=1 is right where every rank trains a model of its "
            "own, in no wrapper",
        )


def _wrapped(modules: Sequence[nn.Module], wrappers: list[Wrapper], declared: Link | None) -> Layout:
    first = wrappers[0]
    members = [collectives.members(link) for link in first.links]
    for other in wrappers[1:]:
        if [collectives.members(link) for link in other.links] != members or other.averaging != first.averaging:
            raise UnsupportedError(
                f"parts of one model exchange their gradients over different ranks: {_words(first)}, {_words(other)}",
                "wrap all its parts over the same ranks",
            )
    if len({wrapper.sharded for wrapper in wrappers}) > 1:
        raise UnsupportedError(
            f"one part of the model is wrapped in {first.kind}, another in {wrappers[-1].kind}",
            "one way for the whole model: fully_shard on a mesh (replicate × shard) replicates and shards",
        )
    inside = {id(p) for wrapper in wrappers for p in wrapper.module.parameters()}
    bare = [n for root in modules for n, p in root.named_parameters() if p.requires_grad and id(p) not in inside]
    if bare and first.members > 1:
        raise MisuseError(
            f"{len(bare)} trainable parameters are in no wrapper, their gradients stay local: {', '.join(bare[:6])}",
            f"wrap the whole model in {first.kind}",
        )
    degree = first.members if declared is None else len(collectives.members(declared))
    if degree > first.members:
        raise MisuseError(
            f"replicas was given {degree} ranks, the gradients are exchanged by {_words(first)}: {first.members} ranks",
            "leave replicas out (the model shows them), or give the ranks that see other examples: mesh['dp']",
        )
    how = "inferred from " if declared is None else "declared; R inferred from "
    layout = Layout(degree, first.averaging, first.links, wrappers, first.kind, how + _words(first))
    layout.notes.extend(_strangers(modules, first.links))
    compiled = any(hasattr(root, "_orig_mod") for root in modules)
    for wrapper in wrappers:
        wrapper.compiled = compiled or getattr(wrapper.module, "_compiled_call_impl", None) is not None
        layout.notes.extend(wrapper.notes)
        hook = wrapper.hook() if isinstance(wrapper, Ddp) else None
        if hook is not None and not any(hook.endswith(name) for name in _MEANS):
            layout.notes.append(
                f"unverified: the communication hook {hook} decides what becomes of the gradients; the updates are the "
                "ones meant only if it returns their mean over the ranks"
            )
    return layout


def _strangers(modules: Sequence[nn.Module], links: Sequence[Link]) -> list[str]:
    """What to say where ranks are neither replicas of this model nor hold parts of it."""
    sizes = {collectives.members(link): len(collectives.members(link)) for link in links}
    parameters = [p for root in modules for p in root.parameters()]
    sizes |= {ranks: size for ranks, (_, size) in sharded.dimensions_of(parameters).items()}
    known = math.prod(sizes.values())
    if known >= collectives.world():
        return []
    return [
        f"unverified: {collectives.world() - known} of {collectives.world()} ranks are neither replicas of this model "
        "nor hold parts of its parameters (stages of a pipeline?): norms, clipping and skipping are those of this part"
    ]


def _unwrapped(modules: Sequence[nn.Module], declared: Link | None) -> Layout:
    if declared is not None:
        count = len(collectives.members(declared))
        return Layout(
            count, count, (declared,), [], "the engine", "declared; gradients are averaged by the engine at each update"
        )
    parameters = [p for root in modules for p in root.parameters()]
    parts = sharded.dimensions_of(parameters) if collectives.world() > 1 else {}
    if parts:
        ranks = " × ".join(str(list(ranks)) for ranks in parts)
        how = f"inferred: parameters are sharded over ranks {ranks} (tensor parallel), nobody exchanges gradients"
        return Layout(backend="one replica", how=how, notes=_strangers(modules, ()))
    if collectives.world() > 1:
        raise MisuseError(
            f"the process group has {collectives.world()} ranks, and the model is in no wrapper that exchanges "
            "gradients: each rank would train a model of its own",
            "DistributedDataParallel(model) or fully_shard(model), and the wrapped model in manager.step; or "
            "replicas=process_group to let the manager average gradients; replicas=1 only where every rank is meant to "
            "train a model of its own (a sweep), never with a model in DDP or fully_shard",
        )
    return Layout()


def _covers(wrapper: Wrapper, modules: Sequence[nn.Module]) -> bool:
    inside = {id(p) for p in wrapper.module.parameters()}
    return all(id(p) in inside for root in modules for p in root.parameters() if p.requires_grad)


def _words(wrapper: Wrapper) -> str:
    ranks = " × ".join(str(list(collectives.members(link))) for link in wrapper.links)
    return f"{wrapper.kind} over ranks {ranks}"
