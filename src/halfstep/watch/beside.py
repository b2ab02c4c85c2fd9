"""Each update traced, so that two runs can be set side by side: layers' gradients, data, random numbers.

Nothing of this is done in an ordinary watch. Gradients are measured after the group's last backward, before they are
unscaled or clipped; norms and projections stay on their device until the stream reads them.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from halfstep.events import Place, UpdateTraced
from halfstep.watch.gradients import Gradients
from halfstep.watch.modules import Modules, plain_tensors
from halfstep.watch.patches import Patches, uncompiled
from halfstep.watch.stream import has_value, norms_of

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_DENSE = 64  # attempts of an optimizer of which each is sampled; of later ones, those whose number has few bits
_BITS = 3
_ELEMENTS = 4096  # of a tensor that a projection looks at


def is_sampled(attempt: int) -> bool:
    """Whether the layers of this attempt (from 1 on) are measured: alike in every run, ever more seldom."""
    return attempt <= _DENSE or attempt.bit_count() <= _BITS


class Beside:
    """``attempts``: of each optimizer, counted as its gradients come to be used."""

    def __init__(self, session: Session, gradients: Gradients, modules: Modules) -> None:
        self._session = session
        self._gradients = gradients
        self._modules = modules
        self.attempts: dict[int, int] = {}
        self._fresh = False  # a backward has ended since gradients were measured last
        self._norms: dict[int, tuple[list[str], torch.Tensor]] = {}  # optimizer -> layers, squared norms
        self._weights: dict[int, tuple[list[str], torch.Tensor]] = {}
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._data: dict[torch.device, torch.Tensor] = {}  # whole, real, size squared
        self._handle: Any = None
        self._told = False

    def install(self, patches: Patches) -> None:
        patches.around(torch.autograd, "backward", None, self._after_backward)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.around(torch.nn.utils.clip_grad, name, self._before_use)
        scaler = torch.amp.GradScaler
        patches.around(scaler, "unscale_", self._before_use)
        patches.around(scaler, "step", self._before_scaler_step, self._after_scaler_step, self._after_scaler_step)
        patches.around(dataloader._BaseDataLoaderIter, "__next__", None, self._after_next)
        self._modules.entries.append(self._called)
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        self._handle.remove()

    # -- gradients -----------------------------------------------------------------------------------------------

    def _after_backward(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fresh = True

    def _before_use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._measure()

    def _before_scaler_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        if args[0]._enabled and isinstance(optimizer, torch.optim.Optimizer):
            self._measure()
            self._tell(optimizer)
            self._told = True  # the optimizer's own hook, if it comes to that, has nothing to add

    def _after_scaler_step(self, *_: Any) -> None:
        self._told = False

    @uncompiled
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._session.patches.live and not self._told:
            self._session.patches.observe("tracing an update", self._stepping, optimizer)

    def _stepping(self, optimizer: torch.optim.Optimizer) -> None:
        self._measure(getattr(optimizer, "grad_scale", None))
        self._tell(optimizer)

    def about_to_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Somebody is about to unscale and clip out of sight."""
        self._measure()

    def passed_over(self, optimizer: torch.optim.Optimizer) -> None:
        """An attempt was skipped by somebody who asked neither the optimizer nor a scaler."""
        self._measure()
        self._tell(optimizer)

    def _measure(self, divisor: Any = None) -> None:
        """Take the norms of all gradients as the last backward has left them."""
        if not self._fresh:
            return
        self._fresh = False
        for ident, optimizer in self._session.ledger.optimizers():
            number = self.attempts.get(ident, 0) + 1
            if not is_sampled(number):
                continue
            held = [p for g in optimizer.param_groups for p in g["params"]]
            graded = [p for p in held if p.grad is not None and not p.grad.is_sparse and has_value(p.grad)]
            mark = self._gradients.carried.get(ident)
            scale = divisor if isinstance(divisor, torch.Tensor) else mark.scale if mark is not None else None
            if graded:
                self._norms[ident] = self._layers(ident, graded, [_grad(p) for p in graded], scale)
            if number == 1:
                self._weights[ident] = self._layers(ident, held, [p.detach() for p in held], None)

    def _layers(
        self, ident: int, parameters: list[torch.Tensor], values: list[torch.Tensor], scale: torch.Tensor | None
    ) -> tuple[list[str], torch.Tensor]:
        """Norm of each layer: a module that owns parameters of its own."""
        home = values[0].device
        with torch.no_grad():
            norms = torch.cat([norms_of([v]).to(home) for v in values]) if _mixed(values) else norms_of(values)
            if scale is not None:
                norms = norms / scale.to(home)
            names = [self._layer(parameter, ident, n) for n, parameter in enumerate(parameters)]
            layers = list(dict.fromkeys(names))
            places = torch.tensor([layers.index(name) for name in names], device=home)
            squares = torch.zeros(len(layers), dtype=norms.dtype, device=home).index_add_(0, places, norms.square())
        return layers, squares

    def _layer(self, parameter: torch.Tensor, ident: int, number: int) -> str:
        known = self._names.get(id(parameter))
        if known is None or known[0]() is not parameter:
            for root in self._modules.roots.values():
                module = root()
                for name, own in module.named_parameters() if module is not None else ():
                    self._names.setdefault(id(own), (weakref.ref(own), name.rpartition(".")[0] or name))
            known = self._names.get(id(parameter))
        if known is None or known[0]() is not parameter:
            known = (weakref.ref(parameter), f"optimizer {ident}, parameter {number}")
            self._names[id(parameter)] = known
        return known[1]

    def _tell(self, optimizer: torch.optim.Optimizer) -> None:
        ident = self._session.ledger.ident(optimizer)
        self.attempts[ident] = self.attempts.get(ident, 0) + 1
        norms, weights = self._norms.pop(ident, None), self._weights.pop(ident, None)
        data, self._data = list(self._data.values()), {}
        draft = self._session.stream.emit(
            UpdateTraced, at=self._session.place(), optimizer=ident, random=_random_state()
        )
        parts = [part for part in (norms, weights) if part is not None]
        draft.tensors = [*(t for _, values in parts for t in values.unbind()), *(t for v in data for t in v.unbind())]

        def finish(fields: dict[str, Any], numbers: Sequence[float]) -> None:
            read = iter(numbers)
            for name, part in (("norms", norms), ("weights", weights)):
                if part is not None:
                    fields[name] = {layer: math.sqrt(next(read)) for layer in part[0]}
            rest = list(read)
            fields["whole"], fields["real"] = sum(rest[0::3]), sum(rest[1::3])
            fields["size"] = math.sqrt(sum(rest[2::3]))

        draft.finish = finish

    # -- data ----------------------------------------------------------------------------------------------------

    def _after_next(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen(result)

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any, at: Place | None) -> None:
        self._seen((*args, *kwargs.values()))

    def _seen(self, value: Any) -> None:
        """Add the data in it; what was computed from parameters is none."""
        for tensor in plain_tensors(value):
            if tensor.requires_grad or not tensor.numel() or not has_value(tensor) or tensor.is_complex():
                continue
            flat = tensor.detach().reshape(-1)
            wide = torch.float32 if tensor.device.type == "mps" else torch.float64
            few = flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS].to(wide)
            along = torch.arange(few.numel(), device=tensor.device, dtype=wide).add_(1).cos_()
            number, nothing = torch.dot(few, along), torch.zeros((), device=tensor.device, dtype=wide)
            new = [nothing, number, torch.dot(few, few)] if flat.is_floating_point() else [number, nothing, nothing]
            together = torch.stack(new)
            known = self._data.get(tensor.device)
            self._data[tensor.device] = together if known is None else known + together


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _mixed(values: list[torch.Tensor]) -> bool:
    return len({value.device for value in values}) > 1


def _random_state() -> int:
    """Reading the states draws nothing and waits for nothing."""
    mark = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            mark = zlib.crc32(generator.get_state().numpy().tobytes(), mark)
    return mark
