"""Collectives that the script or a library calls itself: gradients averaged by hand, parameters, counts, losses.

What DDP does inside its own reducer is not seen here. A call is told apart by the memory it works on; nothing is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import Exchanged
from halfstep.watch.patches import Patches
from halfstep.watch.replicas import Replicas
from halfstep.watch.stream import Draft

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_VERBS = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor"),
)
_FEW = 32  # numbers: no gradient, but counts, losses, flags


class Collectives:
    def __init__(self, session: Session, replicas: Replicas) -> None:
        self._session = session
        self._replicas = replicas
        self._within = 0
        self._known: dict[int, tuple[str, int]] = {}  # address -> what lies there, whose
        self._known_at: tuple[int, int] = (-1, -1)
        self._last: tuple[tuple[Any, ...], Draft] | None = None
        self._ended: list[Any] = []

    def install(self, patches: Patches) -> None:
        if not torch.distributed.is_available():
            return
        from torch.distributed import distributed_c10d

        for verb in _VERBS:
            patches.around(distributed_c10d, verb, self._before(verb), self._after, self._failed)
        patches.around(distributed_c10d, "destroy_process_group", self._before_end)

    def _before_end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the groups until the next are ended, or the watch is.

        A group waits for its own threads when it goes. If a DDP wrapper's reducer lets go of it last, it does so with
        the interpreter's lock in hand, for which such a thread may be waiting to let go of a tensor: for good. What
        lets go here has no lock in hand.
        """
        self._ended = list(torch.distributed.distributed_c10d._world.pg_map)

    def _before(self, verb: str) -> Any:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._within += 1
            if self._within == 1 and self._replicas.together:
                self._note(verb, args, kwargs)

        return before

    def _after(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._within -= 1

    def _failed(self, token: Any, error: BaseException) -> None:
        self._within -= 1

    def _note(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        tensors = [t for v in values for t in (v if isinstance(v, (list, tuple)) else (v,)) if _is_plain(t)]
        if not tensors:
            return
        found = [known for t in tensors if (known := self._what(t)) is not None]
        floats = max((t.numel() for t in tensors if t.is_floating_point()), default=0)
        what = found[0][0] if found else "buffer" if floats > _FEW else "number"
        at = self._session.place()
        op = next((str(v).rpartition(".")[2].lower() for v in values if "RedOpType" in type(v).__name__), "")
        if not op and verb in ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter"):
            op = "sum"
        key = (what, verb, op, at, self._session.stream.micro, self._session.look.updates)
        owners = tuple(sorted({owner for _, owner in found}))
        if self._last is not None and self._last[0] == key:
            fields = self._last[1].fields
            fields["times"] += 1
            fields["optimizers"] = tuple(sorted({*fields["optimizers"], *owners}))
            return
        self._last = (
            key,
            self._session.stream.emit(
                Exchanged, at=at, what=what, operator=verb, op=op, ranks=_ranks(values), optimizers=owners, times=1
            ),
        )

    def _what(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Whether this is the memory of a gradient or a parameter, and of whose."""
        now = (self._session.stream.micro, self._session.look.updates)
        if now != self._known_at:
            self._known_at = now
            self._known = {}
            for ident, optimizer in self._session.ledger.optimizers():
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if _is_plain(parameter):
                        self._known[parameter.data_ptr()] = "parameters", ident
                    if parameter.grad is not None and _is_plain(parameter.grad):
                        self._known[parameter.grad.data_ptr()] = "gradients", ident
        return self._known.get(tensor.data_ptr()) if tensor.is_floating_point() else None


def _ranks(values: tuple[Any, ...]) -> tuple[int, ...]:
    group = next((v for v in values if isinstance(v, torch.distributed.ProcessGroup)), None)
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def _is_plain(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type != "meta"
    )
