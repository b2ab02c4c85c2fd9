"""One micro-batch run forward and backward, in half precision or in FP32, and nothing of the model changed by it."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfstep.errors import MisuseError
from halfstep.probe.runs.fp32 import Undone
from halfstep.probe.trial import RandomState, lowest_dtype, unchanged
from halfstep.probe.whole import mapped
from halfstep.watch.calls import devices
from halfstep.watch.exact import widened
from halfstep.watch.ranges import HALF
from halfstep.watch.replay import bare
from halfstep.watch.session import Session


class Sight(Protocol):
    """What sees a pass: entered around its forward and around its backward."""

    def forward(self, model: nn.Module) -> AbstractContextManager[Any]: ...

    def backward(self, loss: Tensor) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class Pass:
    """What a pass gave. ``gradients``: by parameter name, multiplied by ``scale``; those that no gradient reached lack.

    ``loss`` as ``loss_fn`` returned it; ``dtype``: the lowest precision seen in its graph. ``root``: the scaled loss,
    without its graph.
    """

    loss: float
    root: Tensor
    gradients: dict[str, Tensor]
    scale: float
    dtype: torch.dtype

    @property
    def spoiled(self) -> tuple[str, ...]:
        """The parameters whose gradient is not finite."""
        return tuple(name for name, g in self.gradients.items() if not bool(torch.isfinite(g).all()))


class Passes:
    """Runs the same micro-batch again and again, from one random state, from the same buffers."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> None:
        self.model = bare(model)
        self.loss_fn = loss_fn
        with torch.inference_mode(False):  # what a session of inference loaded takes part in no backward
            self.batch = mapped(batch, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
        self._start = RandomState()

    def half(self, region: AbstractContextManager[Any], scale: float, *sights: Sight) -> Pass:
        """A pass inside ``region``, the loss multiplied by ``scale``."""
        with self._alone():
            return self._run(region, scale, sights, self.batch)

    def full(self, *sights: Sight, scale: float = 1.0) -> Pass:
        """A pass in FP32: no autocast, half parameters and inputs widened, casts to half undone, no TF32."""
        with self._alone(), _no_autocast(), _no_tf32(), Undone():
            substitute(self.model, _wide)
            return self._run(contextlib.nullcontext(), scale, sights, mapped(self.batch, widened))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The model as it was afterwards, the attributes that a forward sets included; no session sees it."""
        attributes = [(module, dict(module.__dict__)) for module in self.model.modules()]
        with torch.inference_mode(False), torch.enable_grad(), unwatched(), unchanged(self.model):
            self._start.restore()
            try:
                yield
            finally:
                for module, before in attributes:
                    module.__dict__.clear()
                    module.__dict__.update(before)

    def _run(self, region: AbstractContextManager[Any], scale: float, sights: tuple[Sight, ...], batch: Any) -> Pass:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(warnings.catch_warnings())
                # Hooks see a module compiled on its own twice, which changes nothing here.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            for sight in sights:
                stack.enter_context(sight.forward(self.model))
            stack.enter_context(region)
            loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise MisuseError(f"loss_fn returned {shown}", "return the loss as a scalar tensor: loss_fn(model, batch)")
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not loss.requires_grad or not parameters:
            raise MisuseError("the loss does not depend on any parameter", "use the model that loss_fn is handed")
        dtype = lowest_dtype(loss)
        with contextlib.ExitStack() as stack:
            for sight in sights:
                stack.enter_context(sight.backward(loss))
            # As scalers do, by a 0-dim FP32 factor: a half-precision loss becomes FP32 here, and half on the way back.
            root = loss.reshape(()) * torch.full((), scale, device=loss.device) if scale != 1.0 else loss.reshape(())
            taken = torch.autograd.grad(root, list(parameters.values()), allow_unused=True)
        found = ((n, g) for n, g in zip(parameters, taken, strict=True) if g is not None)
        gradients = {n: g.to_dense() if g.is_sparse else g for n, g in found}
        if not gradients:
            raise MisuseError("no gradient reached a parameter of the model", "use the model that loss_fn is handed")
        return Pass(float(loss.detach()), root.detach(), gradients, scale, dtype)


def substitute(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> None:
    """Put other parameters and buffers in place, shared ones once; `unchanged` puts the old ones back.

    ``change`` returns the new values, or None where a tensor stays.
    """
    known: dict[int, Tensor | None] = {}
    for module in model.modules():
        slots: Any
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    new = change(tensor)
                    if new is not None and slots is module._parameters:
                        new = nn.Parameter(new, tensor.requires_grad)
                    known[id(tensor)] = new
                slots[name] = tensor if known[id(tensor)] is None else known[id(tensor)]


def _wide(tensor: Tensor) -> Tensor | None:
    return tensor.detach().float() if tensor.dtype in HALF else None


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Whatever autocast the loss or the model asks for in this thread, none is on."""
    here = threading.get_ident()
    enter: Any = torch.autocast.__enter__

    def entered(self: torch.autocast) -> Any:
        result = enter(self)
        if threading.get_ident() == here:
            torch.set_autocast_enabled(self.device, False)  # leaving puts back what was on before, as ever
        return result

    with contextlib.ExitStack() as stack:
        for kind in devices():
            stack.enter_context(torch.autocast(kind, enabled=False))
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_tf32() -> Iterator[None]:
    """FP32 products with all their digits."""
    if not torch.cuda.is_available():
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A session that watches this process sees nothing of what is run here."""
    session = Session._active
    if session is None:
        yield
        return
    live, opened = session.patches.live, session.look.is_open
    session.patches.live = False
    session.look.close()
    try:
        yield
    finally:
        session.patches.live = live
        if opened:
            session.look.open()
