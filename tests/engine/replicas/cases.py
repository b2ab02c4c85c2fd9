"""What members of a company run: training runs whose numbers the tests hold against the FP64 twin of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.engine.runs import IGNORED, MicroBatch, Net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from halfstep.engine.contribute import Contributor
from halfstep.engine.manager import MixedPrecisionManager
from halfstep.engine.updater import Updater


@dataclass
class Shared:
    """A training run on several replicas. ``data[r]`` is the epoch of replica ``r``, in micro-batches.

    ``flow``: "ahead" (a weight function), "graph" (read from the loss), "along" (given to backward), "masked" (ahead,
    the loss a hand-written masked mean: NaN where nothing is supervised), "plain" (as the caller scaled it),
    "flat" (no groups, weights given to backward); "plain" has no groups either
    """

    net: nn.Module
    data: list[list[MicroBatch]]
    size: int = 2
    flow: str = "ahead"
    wrap: str = "ddp"
    options: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    drop_last: bool = False
    terms: int = 1
    lr: float = 0.1
    epochs: int = 1
    optimizer: str = "sgd"
    named: bool = True
    """Whether ``groups`` is given the model."""
    late: bool = False
    """The path of an accelerator, here on CPU tensors: no outcome is known when ``step`` returns."""


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": partial(torch.optim.AdamW, eps=1e-2),
    "adamw fused": partial(torch.optim.AdamW, eps=1e-2, fused=True),
}


class Slim(Net):
    """Every parameter gets a gradient: what a reducer expects unless told otherwise."""

    def __init__(self, width: int = 3, hidden: int = 5, classes: int = 4) -> None:
        super().__init__(width, hidden, classes)
        del self.idle


class Meeting(torch.autograd.Function):
    """Every rank has to come by, forward and backward, or all others wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        dist.all_reduce(torch.ones(1))
        return gradient


class Together(nn.SyncBatchNorm):
    """Meets the other ranks as a SyncBatchNorm does (torch's own wants a GPU), and changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return Meeting.apply(x) if dist.is_initialized() else x


class Synced(Slim):
    def __init__(self) -> None:
        super().__init__()
        self.together = Together(5, affine=False, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.together(self.norm(self.first(x)))))


def wrapped(run: Shared, net: nn.Module) -> nn.Module:
    """``wrap``: "ddp", "compiled" (that, compiled), "none", or "fsdp".

    ``options`` are those of the wrapper; for "fsdp" they may name the shape of a mesh.
    """
    if run.wrap == "none":
        return net
    if run.wrap == "ddp":
        with patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle"):  # it refuses the CPU
            return DistributedDataParallel(net, **run.options)
    if run.wrap == "compiled":
        return torch.compile(DistributedDataParallel(net, **run.options), backend="eager")  # type: ignore[return-value]
    options = dict(run.options)
    shape, factor = options.pop("mesh", (dist.get_world_size(),)), options.pop("factor", None)
    names = ("dp",) if len(shape) == 1 else ("replicate", "shard")
    if options.pop("policy", None):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (net.first, net.last, net):
        fully_shard(part, **options)
    for part in (net.first, net.last, net):
        if factor is not None:
            part.set_gradient_divide_factor(factor)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other way
    return net


def live(batch: MicroBatch) -> int:
    return int((batch.labels != IGNORED).sum())


def weights(run: Shared, batch: MicroBatch) -> list[int]:
    return [live(batch), len(batch.x)][: run.terms]


def losses(run: Shared, model: nn.Module, batch: MicroBatch) -> list[Tensor]:
    """Each term, as a mean over what it counts."""
    logits = model(batch.x.to(next(model.parameters()).dtype))
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat, labels = logits.flatten(0, 1), batch.labels.flatten()
    if run.flow == "masked":
        each = F.cross_entropy(flat, labels, reduction="none", ignore_index=IGNORED)
        mask = (labels != IGNORED).to(each.dtype)
        entropy = (each * mask).sum() / mask.sum()
    else:
        entropy = F.cross_entropy(flat, labels)
    return [entropy, 0.3 * (logits.mean(1) ** 2).mean()][: run.terms]


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its parts."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def train(rank: int, world: int, run: Shared) -> dict[str, Any]:
    """The rows of all updates, the parameters after each, and the record."""
    if not run.late:
        return _train(rank, run)
    unread = property(lambda self: False, lambda self, value: None)
    with patch.object(Contributor, "host", unread, create=True), patch.object(Updater, "host", unread, create=True):
        return _train(rank, run)


def _train(rank: int, run: Shared) -> dict[str, Any]:
    net = copy.deepcopy(run.net)
    model = wrapped(run, net)
    optimizer = OPTIMIZERS[run.optimizer](model.parameters(), lr=run.lr)
    policy = {"precision": "fp32", "max_norm": 1.0} | run.policy
    if policy.get("replicas") == "world":
        policy["replicas"] = dist.group.WORLD
    if policy.get("replicas") == "model":
        policy["replicas"] = model
    manager = MixedPrecisionManager(**policy)
    rows: list[dict[str, Any]] = []
    parameters: list[list[Tensor]] = []

    def step() -> None:
        update = manager.step(model, optimizer)
        rows.append({**update.as_dict(), "layer_norms": update.layer_norms, "weights": update.weights})
        parameters.append([whole(p) for p in net.parameters()])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(run.epochs):
            if run.flow in ("flat", "plain"):
                for position, batch in enumerate(run.data[rank], 1):
                    with manager.context():
                        loss = losses(run, model, batch)
                    manager.backward(loss, weight=None if run.flow == "plain" else weights(run, batch))
                    if position % run.size == 0:
                        step()
                if manager.pending:
                    step()
                continue
            weigher = (lambda batch: weights(run, batch)) if run.flow in ("ahead", "masked") else None
            shown = model if run.named else None
            for group in manager.groups(run.data[rank], run.size, weight=weigher, model=shown, drop_last=run.drop_last):
                for batch in group:
                    with manager.context():
                        loss = losses(run, model, batch)
                    manager.backward(loss, weight=weights(run, batch) if run.flow == "along" else None)
                step()
    return {"rows": rows, "parameters": parameters, "record": manager.report(), "scale": manager.loss_scale}


def hello(rank: int, world: int) -> int:
    """Who is there."""
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return int(total)
