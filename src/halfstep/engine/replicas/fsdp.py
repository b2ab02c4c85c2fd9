"""``fully_shard`` (FSDP2) as the engine sees it: parameters in parts, gathered in each forward, reduced in backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from halfstep.engine.replicas.wrappers import Wrapper
from halfstep.errors import UnsupportedError


def is_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to it (or ``replicate``, which is built alike)."""
    return dist.is_available() and hasattr(module, "_get_fsdp_state")


class Fsdp(Wrapper):
    """One module that ``fully_shard`` was applied to, with all inside it. Forward and backward are collectives.

    Gradients are averaged over all ranks of the mesh the module was given, sharded and replicated ones (HSDP), unless
    a divide factor was set. Parameters and their gradients here are parts; in the graph stand passing whole ones.
    """

    kind = "fully_shard"
    sharded = lockstep = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        units = list(self._units())
        if not units:
            raise UnsupportedError("fully_shard was applied to a module without parameters", "shard its parent instead")
        reaches = {self._reach(unit) for unit in units}
        if len(reaches) != 1:
            raise UnsupportedError(
                f"parts of one model are sharded over different ranks, or divide by different factors: {reaches}",
                "fully_shard all its parts on one mesh",
            )
        info = units[0].mesh_info
        dimensions = [d for d in (info.shard_mesh_dim, info.replicate_mesh_dim) if d is not None]
        self.links = tuple(info.mesh.get_group(d) for d in dimensions)
        self.members = 1
        for link in self.links:
            self.members *= dist.get_world_size(link)
        factor = units[0].gradient_divide_factor
        self.averaging = self.members if factor is None else factor
        if len(dimensions) > 1:
            self.kind = "fully_shard (HSDP)"
        elif info.shard_mesh_dim is None:
            self.kind = "replicate"
        if any(unit._all_reduce_hook is not None for unit in units):
            self.notes.append(
                "unverified: an all-reduce hook of fully_shard decides what becomes of the gradients; the updates are "
                "the ones meant only if it keeps them a mean over the ranks"
            )
        policy = units[0].mp_policy
        self.dtypes = {
            name: str(value).removeprefix("torch.")
            for name in ("param_dtype", "reduce_dtype")
            if (value := getattr(policy, name)) is not None
        }

    def _units(self) -> Iterator[Any]:
        for module in self.module.modules():
            if is_fsdp(module):
                yield from module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]

    @staticmethod
    def _reach(unit: Any) -> tuple[Any, ...]:
        info = unit.mesh_info
        dimensions = [d for d in (info.shard_mesh_dim, info.replicate_mesh_dim) if d is not None]
        ranks = tuple(tuple(dist.get_process_group_ranks(info.mesh.get_group(d))) for d in dimensions)
        return ranks, unit.gradient_divide_factor

    def hold(self, exchange: bool, buffers: bool) -> None:
        self.module.set_requires_gradient_sync(exchange)  # type: ignore[operator]

    def free(self) -> None:
        self.module.set_requires_gradient_sync(True)  # type: ignore[operator]

    def waits(self) -> bool:
        return True

    def _leaves(self) -> Iterable[Tensor]:
        for unit in self._units():
            for parameter in unit.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)  # made by the first forward
                if whole is not None:
                    yield whole

    def forget(self) -> None:
        """Drop what is pending; whole gradients that were kept local are among it."""
        super().forget()
        for unit in self._units():
            for parameter in unit.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None


def roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules that ``fully_shard`` was applied to."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for root in modules:
        for module in root.modules():  # parents come first
            if is_fsdp(module) and id(module) not in inside:
                inside |= {id(inner) for inner in module.modules()}
                found.append(module)
    return found
