"""Where autocast's dtype is not what the script means: gradients of an FP32 forward, half input where it is off."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import BackwardDowncast, HalfInOffRegion, Place
from halfstep.watch.autocasts import HALF, Autocasts, Region, name_of
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_NODES = 50_000  # operators remembered, when no backward comes
_TOLD = 4  # events of one kind for each line
PRODUCTS = frozenset(
    (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "matmul",
        "linear",
        "convolution",
        "_convolution",
        "conv2d",
        "linalg_vecdot",
    )
)
_DELICATE = frozenset(
    (
        "_softmax",
        "_log_softmax",
        "exp",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "logsumexp",
        "pow",
        "rsqrt",
        "sum",
        "mean",
        "prod",
        "cumsum",
        "cumprod",
        "var",
        "std",
        "var_mean",
        "norm",
        "linalg_vector_norm",
        "native_layer_norm",
        "native_group_norm",
        "_fused_rms_norm",
        "nll_loss_forward",
        "nll_loss2d_forward",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "multi_margin_loss",
    )
)  # operators for whose sake a region is switched off: they lose most in half precision


class _Call:
    """A backward that was called inside a region that is on."""

    __slots__ = ("casts", "node", "operator", "operators", "region", "second", "worst")

    def __init__(self, region: Region, second: bool) -> None:
        self.region = region
        self.second = second
        self.node: tuple[str, int] = ("", -1)
        self.casts: list[torch.Tensor] = []  # made by autocast for the running gradient operator
        self.operators = 0
        self.operator = ""
        self.worst = ""


class _Here(threading.local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.calls: list[_Call | None] = []
        self.lowered: set[int] = set()  # storages that the script itself cast to half where autocast is off
        self.full: set[int] = set()  # sequence numbers of forward products in FP32 where autocast was off


class Casts:
    def __init__(self, session: Session, autocasts: Autocasts) -> None:
        self._session = session
        self._autocasts = autocasts
        self._here = _Here()
        self._native: set[int] = set()  # regions that are off around modules which are half themselves
        self._told: Counter[Place | None] = Counter()

    def install(self, patches: Patches) -> None:
        patches.around(torch.autograd, "backward", self._before, self._after, self._failed)
        patches.around(torch.autograd, "grad", self._before, self._after, self._failed)
        if self not in self._session.look.lenses:
            self._session.look.lenses.append(self)

    # -- around a backward ---------------------------------------------------------------------------------------

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        here, stack = self._here, self._autocasts.stack
        call = None
        if stack and stack[-1].half is not None:
            second = kwargs.get("create_graph", False) or (len(args) > 3 and args[3] is True)
            call = _Call(stack[-1], bool(second))
        here.calls.append(call)
        here.lowered.clear()

    def _failed(self, token: Any, error: BaseException) -> None:
        self._here.calls.pop()

    def _after(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._here.calls.pop()
        if not self._here.calls:
            self._here.full.clear()
        if call is None or not call.operators:
            return
        self._session.stream.emit(
            BackwardDowncast,
            at=self._session.place(),
            dtype=str(call.region.half),
            operators=call.operators,
            operator=call.operator,
            node=call.worst,
            second=call.second,
        )

    # -- operators -----------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        stack = self._autocasts.stack
        node = torch._C._current_autograd_node()
        if node is None:
            if operation.name in PRODUCTS and not (stack and stack[-1].enabled):
                self._note_full(operation.out)
            if len(stack) > 1 and not stack[-1].enabled:
                self._in_off_region(operation, stack)
        elif stack:
            self._in_backward(operation, node, stack)

    def _note_full(self, out: Any) -> None:
        """A product that the script keeps in FP32, not one that torch computes so inside another operator."""
        full = self._here.full
        if isinstance(out, torch.Tensor) and out.dtype is torch.float32 and torch.is_grad_enabled():
            if len(full) > _NODES:
                full.clear()
            full.add(torch.autograd._get_sequence_nr() - 1)

    def _in_backward(self, operation: Operation, node: Any, stack: Sequence[Region]) -> None:
        call = self._here.calls[-1] if self._here.calls else None
        if call is None or stack[-1] is not call.region:
            return  # a recomputation enters regions of its own
        if torch.is_grad_enabled() and (not call.second or hasattr(node, "_forward_cls")):
            return  # a recomputation that restores nothing
        out = operation.out
        if not isinstance(out, torch.Tensor) or out.dtype not in HALF:
            return
        name = node.name()
        if operation.name == "_to_copy":
            if operation.args[0].dtype == torch.float32 and not name.startswith("ToCopy"):
                here = (name, node._sequence_nr())
                if call.node != here:
                    call.node = here
                    call.casts.clear()
                call.casts.append(out)
        elif operation.name in PRODUCTS and call.casts:
            cast = {_storage(t) for t in call.casts}
            factors = [t for t in operation.tensors() if t.is_floating_point()]
            if factors and all(_storage(t) in cast for t in factors) and self._was_full(node):
                call.operators += 1
                call.operator = call.operator or operation.name
                call.worst = call.worst or name

    def _was_full(self, node: Any) -> bool:
        """Whether the forward of this gradient operator ran in FP32 because the script wants it so."""
        if not hasattr(node, "_forward_cls"):
            return node._sequence_nr() in self._here.full
        metadata: Any = getattr(node, "_input_metadata", None)
        return bool(metadata) and metadata[0].dtype is torch.float32

    def _in_off_region(self, operation: Operation, stack: Sequence[Region]) -> None:
        region, out = stack[-1], operation.out
        if isinstance(out, (list, tuple)):
            out = next((t for t in out if isinstance(t, torch.Tensor)), None)
        if region.ident in self._native or not isinstance(out, torch.Tensor) or out.dtype not in HALF:
            return
        if operation.name == "_to_copy":
            if operation.args[0].dtype not in HALF:
                self._here.lowered.add(_storage(out))
            return
        inputs = [t for t in operation.tensors() if t.dtype in HALF]
        if any(isinstance(t, torch.nn.Parameter) for t in inputs):
            self._native.add(region.ident)
            return
        if operation.name not in _DELICATE or not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs):
            return
        on = next((r for r in reversed(stack) if r.half is not None and r.device == out.device.type), None)
        if on is None or any(_storage(t) in self._here.lowered for t in inputs):
            return
        at = operation.at
        self._told[at] += 1
        if self._told[at] <= _TOLD:
            self._session.stream.emit(
                HalfInOffRegion,
                at=at,
                operator=operation.name,
                dtype=name_of(out.dtype),
                region=region.ident,
                entered_at=region.at,
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
