"""Cases of meshes and of wrappings: who counts as a replica, and what is refused."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.engine.replicas.cases import whole
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from halfstep.engine.manager import MixedPrecisionManager
from halfstep.engine.replicas import collectives, rows, sharded
from halfstep.errors import HalfstepError


class Tower(nn.Module):
    """Two matrices that can be cut, a norm that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.norm(x))))


def tower() -> Tower:
    torch.manual_seed(1)
    return Tower()


def epoch(replicas: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Four ragged micro-batches a replica."""
    generator = torch.Generator().manual_seed(2)
    counts = [[2 + (r + k) % 3 for k in range(4)] for r in range(replicas)]
    return [
        [(torch.randn(m, 4, generator=generator), torch.randint(0, 4, (m,), generator=generator)) for m in own]
        for own in counts
    ]


def loop(model: nn.Module, data: list[tuple[Tensor, Tensor]], **policy: Any) -> dict[str, Any]:
    manager = MixedPrecisionManager(precision="fp32", max_norm=0.5, **policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in manager.groups(data, 2, weight=lambda batch: len(batch[1]), model=model):
            for x, y in group:
                manager.backward(F.cross_entropy(model(x), y))
            update = manager.step(model, optimizer)
            rows.append({**update.as_dict(), "layer_norms": update.layer_norms})
    report = manager.report()
    return {
        "rows": rows,
        "parameters": [whole(p) for p in model.parameters()],
        "batch": report["batch"],
        "notes": [note["message"] for note in report["notes"]],
    }


def alone(replicas: int, starts: tuple[int, ...] = (0, 2), bare: dict[int, int] | None = None) -> dict[str, Any]:
    """All micro-batches of all replicas, in one process: the groups that begin with these.

    ``bare``: so many at the end of each group of a replica supervise nothing.
    """
    bare = bare or {}
    own = epoch(replicas)
    model = tower()
    manager = MixedPrecisionManager(precision="fp32", max_norm=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = []
    data = [[batch for r, one in enumerate(own) for batch in one[k : k + 2 - bare.get(r, 0)]] for k in starts]
    for group in manager.groups(itertools.chain(*data), len(data[0]), weight=lambda batch: len(batch[1])):
        for x, y in group:
            manager.backward(F.cross_entropy(model(x), y))
        update = manager.step(model, optimizer)
        rows.append({**update.as_dict(), "layer_norms": update.layer_norms})
    return {"rows": rows, "parameters": [p.detach().clone() for p in model.parameters()]}


_CUT = {"first": ColwiseParallel(), "last": RowwiseParallel()}


def tensor_parallel(rank: int, world: int) -> dict[str, Any]:
    """All ranks share one model: one replica."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return loop(parallelize_module(tower(), mesh, copy.deepcopy(_CUT)), epoch(1)[0])


def two_dimensions(rank: int, world: int) -> dict[str, Any]:
    """FSDP2 over ``dp``, tensor parallel over ``tp``: two replicas of two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(tower(), mesh["tp"], copy.deepcopy(_CUT))
    fully_shard(model, mesh=mesh["dp"])
    return loop(model, epoch(2)[mesh.get_local_rank("dp")])


def context_parallel(rank: int, world: int) -> dict[str, Any]:
    """Gradients averaged over four ranks, of which pairs see parts of the same examples: D = 2, R = 4."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = fully_shard(tower(), mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    return loop(model, epoch(4)[rank], replicas=mesh["dp"])


def declared(rank: int, world: int) -> dict[str, Any]:
    """DistributedDataParallel over one dimension of a mesh, given as ``replicas`` too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group = mesh.get_group("dp")
    model = DistributedDataParallel(tower(), process_group=group)
    return loop(model, epoch(2)[mesh.get_local_rank("dp")], replicas=mesh["dp"])


def hooked(rank: int, world: int, kind: str) -> list[str]:
    """What is said of communication hooks."""
    model = DistributedDataParallel(tower())
    if kind == "sum":
        model.register_comm_hook(None, _sum)
    elif kind == "mean":
        model.register_comm_hook(None, allreduce_hook)
    return loop(model, epoch(world)[rank])["batch"]["unverified"]


def _sum(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_sum.__annotations__.clear()  # torch wants its own classes there, or nothing


def divided(rank: int, world: int, by: int) -> dict[str, Any]:
    """The loss divided by hand, perhaps by the number of replicas."""
    model = DistributedDataParallel(tower())
    manager = MixedPrecisionManager(precision="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for group in manager.groups(epoch(world)[rank], 4, weight=lambda batch: len(batch[1]), model=model):
        for x, y in group:
            manager.backward(F.cross_entropy(model(x), y) / by)
        manager.step(model, optimizer)
    report = manager.report()
    return {"verdict": report["normalisation"]["verdict"], "notes": [note["note"] for note in report["notes"]]}


def dropped(rank: int, world: int, wrap: str) -> dict[str, Any]:
    """The first group is left after one micro-batch and discarded."""
    model: Any = tower()
    model = (
        DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    )
    manager = MixedPrecisionManager(precision="fp32", max_norm=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    updates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in manager.groups(epoch(world)[rank], 2, weight=lambda batch: len(batch[1]), model=model):
            for x, y in group:
                manager.backward(F.cross_entropy(model(x), y))
                if group.index == 0:
                    break
            if group.index == 0:
                assert manager.discard() == 1
            else:
                updates.append({**manager.step(model, optimizer).as_dict()})
    return {"rows": updates, "parameters": [whole(p) for p in model.parameters()]}


def two_models(rank: int, world: int) -> list[dict[str, Any]]:
    """Two wrapped models side by side in a flat loop; on rank 1 the second contribution of each weighs nothing."""
    models = [DistributedDataParallel(tower()) for _ in range(2)]
    manager = MixedPrecisionManager(precision="fp32", max_norm=0.5, replicas=models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    kept: list[list[dict[str, Any]]] = [[], []]
    data = epoch(world)[rank]
    for start in (0, 2):
        for position, (x, y) in enumerate(data[start : start + 2]):
            weight = 0 if rank == 1 and position == 1 else len(y)
            losses = [F.cross_entropy(model(x), y, reduction="sum") / weight for model in models]  # 0 / 0 in both
            for loss in losses:
                manager.backward(loss, weight=weight)
        for model, optimizer, updates in zip(models, optimizers, kept, strict=True):
            updates.append(manager.step(model, optimizer).as_dict())
    return [
        {"rows": updates, "parameters": [whole(p) for p in model.parameters()]}
        for updates, model in zip(kept, models, strict=True)
    ]


def traffic(rank: int, world: int, wrap: str, weighed: bool) -> dict[str, int]:
    """Collectives in two groups of two micro-batches: of gradients, and small rows."""
    counts = {"gradients": 0, "rows": 0, "norms": 0}
    gather, reduce, scatter = collectives.gather, dist.all_reduce, DefaultReduceScatter.__call__

    def counting(state: Any, bucket: Any) -> Any:
        counts["gradients"] += 1
        return allreduce_hook(state, bucket)

    def counted_gather(*arguments: Any) -> Any:
        counts["rows"] += 1
        return gather(*arguments)

    def counted_reduce(tensor: Tensor, **options: Any) -> Any:
        counts["norms"] += tensor.dtype == torch.float64  # squares; the hook's own are of gradients
        return reduce(tensor, **options)

    def counted_scatter(*arguments: Any, **options: Any) -> Any:
        counts["gradients"] += 1
        return scatter(*arguments, **options)

    counting.__annotations__.clear()
    model: Any = tower()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
        model.register_comm_hook(dist.group.WORLD, counting)
    else:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    manager = MixedPrecisionManager(precision="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weigher = (lambda batch: len(batch[1])) if weighed else None
    with (
        warnings.catch_warnings(),
        patch.object(collectives, "gather", counted_gather),
        patch.object(rows, "gather", counted_gather),
        patch.object(sharded.dist, "all_reduce", counted_reduce),
        patch.object(DefaultReduceScatter, "__call__", counted_scatter),
    ):
        warnings.simplefilter("ignore")
        for group in manager.groups(epoch(world)[rank], 2, weight=weigher, model=model):
            for x, y in group:
                manager.backward(F.cross_entropy(model(x), y))
            manager.step(model, optimizer)
    return counts


def refused(rank: int, world: int, what: str) -> str:
    """The message of what is refused, and that the group still works after it."""
    model: Any = tower()
    policy: dict[str, Any] = {}
    data: Any = epoch(world)[rank]
    try:
        if what == "bare":
            loop(model, data)
        elif what == "unknown":
            manager = MixedPrecisionManager(precision="fp32")
            next(iter(manager.groups(data, 2)))
        elif what == "flat":
            manager = MixedPrecisionManager(precision="fp32")
            manager.backward(model(data[0][0]).mean(), weight=2)
        elif what == "data parallel":
            loop(nn.DataParallel(model), data)
        elif what == "part":
            model.last = DistributedDataParallel(model.last)
            loop(model, data)
        elif what == "policy":
            policy["on_nonfinite"] = ("skip", "ignore")[rank]
            loop(DistributedDataParallel(model), data, **policy)
        elif what == "kernels":
            sharded = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
            manager = MixedPrecisionManager(precision="fp32")
            manager.backward(sharded(data[0][0]).mean())
            manager.step(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1, fused=True))
        elif what == "seeds":
            torch.manual_seed(rank)
            loop(Tower(), data, replicas=dist.group.WORLD)
        elif what == "not finite":
            data[1][0][0, 0] = (0.0, torch.inf)[rank]
            loop(DistributedDataParallel(model), data, on_nonfinite="raise")
        elif what == "last":
            wrapped = DistributedDataParallel(model)
            next(MixedPrecisionManager(precision="fp32").groups(data, 2, model=wrapped, drop_last=rank == 1))
        elif what == "size":
            wrapped = DistributedDataParallel(model)
            next(iter(MixedPrecisionManager(precision="fp32").groups(data, 2 + rank, model=wrapped)))
        elif what == "too many":
            group = [dist.new_group([r]) for r in range(world)][rank]
            loop(DistributedDataParallel(model, process_group=group), data, replicas=dist.group.WORLD)
        elif what in ("alone in ddp", "alone in fsdp"):
            mesh = init_device_mesh("cpu", (world,))
            wrapped = DistributedDataParallel(model) if what == "alone in ddp" else fully_shard(model, mesh=mesh)
            manager = MixedPrecisionManager(precision="fp32", replicas=1)
            manager.backward(F.cross_entropy(wrapped(data[0][0]), data[0][1]))
            before = [p.detach().clone() for p in model.parameters()]
            try:
                manager.step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))
            finally:
                assert all(bool((a == b).all()) for a, b in zip(before, model.parameters(), strict=True))
                manager.discard()
                groups = manager.groups(data, 2, model=wrapped)
                with pytest.raises(HalfstepError, match="replicas=1, but"):
                    next(groups)
        elif what == "alone":
            loop(model, data, replicas=1)
            group = [dist.new_group([r]) for r in range(world)][rank]
            loop(DistributedDataParallel(model, process_group=group), data, replicas=1)
        elif what == "bypassed":
            wrapped = DistributedDataParallel(model)
            manager = MixedPrecisionManager(precision="fp32")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for group in manager.groups(data, 2, weight=lambda batch: len(batch[1]), model=wrapped):
                for x, y in group:
                    manager.backward(F.cross_entropy(wrapped.module(x), y))
                manager.step(wrapped, optimizer)
    except HalfstepError as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    return "not refused"
