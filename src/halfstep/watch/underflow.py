"""Gradient elements that FP16 rounds to zero: the operator is computed again in FP32, in looked micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches
from halfstep.watch.stream import read

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_WORK = 1 << 25  # multiplications that computing an operator again may take
_FEW = 16  # elements below which a share says nothing


_PRODUCTS = frozenset(("mm", "bmm"))
_ELEMENTWISE = frozenset(
    ("mul", "div", "tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward", "elu_backward")
)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float16 else value


class Underflow:
    """What share of the elements that FP32 keeps did FP16 lose? The worst operator of each backward."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shares: list[torch.Tensor] = []
        self._names: list[str] = []

    def install(self, patches: Patches) -> None:
        self._session.look.lenses.append(self)

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        out = operation.out
        if not operation.backward or not isinstance(out, torch.Tensor) or out.dtype is not torch.float16:
            return
        name, args = operation.name, operation.args
        if name == "_to_copy" and args[0].dtype is torch.float32:
            exact = args[0]
        elif name in _ELEMENTWISE or (name in _PRODUCTS and args[0].numel() * args[1].shape[-1] <= _WORK):
            exact = operation.func(*map(_wide, args))
        else:
            return
        if exact.numel() < _FEW:
            return
        kept = exact != 0
        lost = (kept & (out == 0)).sum()
        self._shares.append(torch.where(kept.sum() >= _FEW, lost / kept.sum().clamp(min=1), 0.0))
        node: Any = torch._C._current_autograd_node()
        self._names.append(f"{name} in {node.name()}" if node is not None else name)

    def taken(self) -> tuple[float, str] | None:
        """The largest share lost since the last call, and the operator; None where nothing was looked at."""
        shares, self._shares = self._shares, []
        names, self._names = self._names, []
        if not shares:
            return None
        numbers = read(shares)
        worst = max(range(len(numbers)), key=numbers.__getitem__)
        return numbers[worst], names[worst]
