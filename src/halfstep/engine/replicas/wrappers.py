"""The wrappers that exchange gradients during backward, as the engine sees them: when, by how much, and with what.

Both can be told to keep gradients local, and both wait for every rank once they were not told so: a rank whose
micro-batch supervises nothing then has to take part with zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from halfstep.errors import UnsupportedError

Edge = tuple[GradientEdge, torch.Size, torch.dtype, torch.device]


class Wrapper:
    """One module whose gradients are exchanged by ``kind``.

    ``members`` ranks exchange its gradients, over ``links``, and divide them by ``averaging``: R, unless something
    else was set. ``exchanged``: whether what is in the gradients now has been exchanged.
    """

    kind = ""
    sharded = False
    """Whether parameters here are parts; whole ones stand in the graph for a while."""
    lockstep = False
    """Whether every forward and backward is a collective: each rank then has to run as many."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.averaging: float = 1
        self.members = 1
        self.links: tuple[Any, ...] = ()
        self.notes: list[str] = []
        self.dtypes: dict[str, str] = {}
        """The wrapper's own precision, where it has one."""
        self.exchanged = False
        self._edges: list[Edge] = []
        self.compiled = False
        """Whether its forward runs compiled, where it is not seen."""
        self._handle = module.register_forward_hook(_Ear(self))

    def remove(self) -> None:
        """Let go of the module: it is not stepped here."""
        self._handle.remove()

    def hold(self, exchange: bool, buffers: bool) -> None:
        """Before a micro-batch's forward: exchange gradients in its backward, or keep them local.

        ``buffers``: whether that forward may send buffers round. Every rank of a group has to do so once, or none.
        """
        raise NotImplementedError

    def free(self) -> None:
        """Put back what was before ``hold``."""
        raise NotImplementedError

    def forward(self, output: Any) -> None:
        """A forward with gradients has run."""
        if self.waits():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    self._edges.append((get_gradient_edge(tensor), tensor.shape, tensor.dtype, tensor.device))

    @property
    def waited_for(self) -> bool:
        """Whether a forward has run whose backward other ranks wait for."""
        return bool(self._edges)

    def gives(self, nodes: set[Any]) -> bool:
        """Whether its outputs are among these nodes of a graph."""
        return any(edge.node in nodes for edge, *_ in self._edges)

    def waits(self) -> bool:
        """Whether other ranks wait for the backward of a forward that runs now."""
        raise NotImplementedError

    def done(self) -> None:
        """A backward through it has run."""
        self.exchanged = bool(self._edges) or (self.compiled and self.waits())
        self._edges = []

    def nothing(self) -> bool:
        """Take part in the exchange with zeros, where other ranks wait for it: True if so.

        Zeros enter at the outputs, so that no loss is differentiated (a masked mean over nothing would give NaN), and
        what arrives at parameters is replaced by zeros (a NaN among the features times zero is NaN).
        """
        edges, self._edges = self._edges, []
        if not edges:
            if self.compiled and self.waits():
                raise UnsupportedError(
                    f"a contribution of weight 0 through a compiled {self.kind}: other ranks wait for its backward",
                    "manager.groups(…, model=model), or torch.compile inside the wrapper",
                )
            return False
        leaves: list[Any] = [p for p in self._leaves() if p.requires_grad]
        handles = [leaf.register_hook(torch.zeros_like) for leaf in leaves]
        try:
            roots = [edge for edge, *_ in edges]
            seeds = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype, device in edges]
            torch.autograd.backward(roots, seeds)
        finally:
            for handle in handles:
                handle.remove()
        self.exchanged = True
        return True

    def _leaves(self) -> Iterable[Tensor]:
        return self.module.parameters()

    def forget(self) -> None:
        """Contributions are used or dropped."""
        self.exchanged = False
        self._edges = []


class Ddp(Wrapper):
    """``DistributedDataParallel``: a mean over its process group, in the backward of any forward outside no_sync."""

    kind = "DistributedDataParallel"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        link: Any = module.process_group
        self.links = (link,)
        self.lockstep = any(isinstance(inner, nn.SyncBatchNorm) for inner in module.modules())
        self._synchronous = False  # whether the last forward was one whose backward exchanges
        self.averaging = self.members = link.size()
        self._before: bool | None = None

    def hold(self, exchange: bool, buffers: bool) -> None:
        module: Any = self.module
        if self._before is None:
            self._before = module.require_backward_grad_sync
        module.require_backward_grad_sync = exchange
        module.require_forward_param_sync = buffers

    def free(self) -> None:
        if self._before is not None:
            module: Any = self.module
            module.require_backward_grad_sync = self._before
            module.require_forward_param_sync = True
            self._before = None

    @property
    def unlearned(self) -> bool:
        """Whether a static graph is still to be learnt: from the first backward there is, exchanged or not.

        Under no_sync torch learns it wrongly (each parameter is then waited for twice), so the first must be one that
        exchanges.
        """
        module: Any = self.module
        return bool(module.static_graph and not module._static_graph_delay_allreduce_enqueued)

    def forward(self, output: Any) -> None:
        self._synchronous = bool(self.module.require_backward_grad_sync)
        super().forward(output)

    def waits(self) -> bool:
        return self.lockstep or bool(self.module.require_backward_grad_sync)

    def done(self) -> None:
        super().done()
        self._settle()

    def nothing(self) -> bool:
        fed = super().nothing()
        if fed:
            self._settle()
        return fed

    def _settle(self) -> None:
        """A backward has run, the group's own or one of zeros."""
        self.exchanged = self.exchanged and (self._synchronous or self.compiled)
        if self.exchanged:
            self._rebuild()

    def _rebuild(self) -> None:
        # After its first exchange a reducer rebuilds its buckets, a collective, at the next forward. On a rank whose
        # last micro-batches weigh nothing that forward is one of this group, on others one of the next: do it now.
        if self.module.reducer._rebuild_buckets():  # type: ignore[union-attr, operator]
            self.module._has_rebuilt_buckets = True  # type: ignore[assignment]

    def hook(self) -> str | None:
        """The name of its communication hook, where one is registered."""
        data = self.module._get_ddp_logging_data()  # type: ignore[operator]
        name = data.get("comm_hook") or ""
        return str(name) or None


class _Ear:
    """A forward hook that tells its wrapper; inert in copies and pickles of the module."""

    def __init__(self, wrapper: Wrapper | None = None) -> None:
        self._wrapper = (lambda: None) if wrapper is None else weakref.ref(wrapper)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        wrapper = self._wrapper()
        if wrapper is not None and wrapper.module is module and torch.is_grad_enabled():
            wrapper.forward(output)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Ear, ())


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dataclass_fields__"):
        for value in vars(output).values():
            yield from _tensors(value)
