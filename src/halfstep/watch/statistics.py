"""Batch statistics under accumulation: what normalising the whole group as one batch would have changed.

While operators are looked at, the backward of a batch normalisation shows its input and the gradient that arrives. From
the micro-batches of one group the same two are put together as one batch, and the gradient that this gives is compared
with the one that was computed. Nothing of the script is run again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import BatchStatistics, Place
from halfstep.watch.look import Operation
from halfstep.watch.parameters import Parameters
from halfstep.watch.patches import Patches
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_OPERATORS = frozenset(f"{kind}batch_norm_backward" for kind in ("", "native_", "cudnn_", "miopen_"))
_ELEMENTS = 1 << 21  # kept for one group at most
_LAYERS = 64
_GROUPS = 2  # measured, of one optimizer


@dataclass(slots=True)
class _Layer:
    owner: int | None
    key: int
    eps: float
    weight: torch.Tensor | None
    parts: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # contribution, input, gradient


class Statistics:
    def __init__(self, session: Session, parameters: Parameters) -> None:
        self._session = session
        self._parameters = parameters
        self._places: weakref.WeakKeyDictionary[torch.nn.Module, Place | None] = weakref.WeakKeyDictionary()
        self._layers: dict[tuple[int, int], _Layer] = {}
        self._kept = 0
        self._measured: dict[int, int] = {}
        self._witness = _AtAttempt(self)
        self._nth = (0, 0)  # contribution, layers without a name of their own seen in it

    def install(self, patches: Patches) -> None:
        patches.around(torch.nn.modules.batchnorm._NormBase, "__init__", None, self._after_init)
        if self not in self._session.look.lenses:
            self._session.look.lenses.append(self)
        if self._witness not in self._parameters.witnesses:
            self._parameters.witnesses.append(self._witness)

    def _after_init(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._places[args[0]] = self._session.place()

    # -- the lens ------------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        if operation.name not in _OPERATORS:
            return
        values = dict(zip((a.name for a in operation.func._schema.arguments), operation.args, strict=False))
        values.update(operation.kwargs)
        gradient, x = values.get("grad_out", values.get("grad_output")), values.get("input")
        if not isinstance(gradient, torch.Tensor) or not isinstance(x, torch.Tensor) or values.get("train") is False:
            return
        weight, mean = values.get("weight"), values.get("running_mean")
        named = weight if isinstance(weight, torch.Tensor) else mean
        micro = self._session.stream.micro
        if isinstance(named, torch.Tensor):
            key, owner = (named.data_ptr(), 0), self._parameters.owner(named)
        else:
            self._nth = (micro, self._nth[1] + 1 if self._nth[0] == micro else 1)
            key, owner = (0, self._nth[1]), None
        if owner is None and x.shape[0] == 1:
            return  # instance normalisation runs on the same operator, its examples laid side by side
        if owner is not None and self._measured.get(owner, 0) >= _GROUPS:
            return
        layer = self._layers.get(key)
        if layer is None and len(self._layers) < _LAYERS:
            eps = values.get("eps", values.get("epsilon"))
            layer = self._layers[key] = _Layer(owner, key[0], float(eps or 0.0), weight)
        if layer is not None and self._kept + x.numel() <= _ELEMENTS:
            layer.parts.append((micro, x.detach(), gradient.detach()))
            self._kept += x.numel()

    # -- at an attempt -------------------------------------------------------------------------------------------

    def attempted(self, ident: int) -> None:
        """The optimizer is about to update: compare what its layers did in this group."""
        own = {k: layer for k, layer in self._layers.items() if layer.owner in (ident, None)}
        for key in own:
            del self._layers[key]
        self._kept = sum(x.numel() for layer in self._layers.values() for _, x, _ in layer.parts)
        layers = [layer for layer in own.values() if _is_group(layer)]
        if not layers:
            return
        self._measured[ident] = self._measured.get(ident, 0) + 1
        with torch.no_grad():
            differences = torch.stack([_difference(layer) for layer in layers])
        first = layers[-1]  # backward comes to the first layer last
        self._session.stream.emit(
            BatchStatistics,
            at=self._made_at([layer.key for layer in layers]),
            optimizer=ident,
            layers=len(layers),
            contributions=tuple(micro for micro, _, _ in first.parts),
            samples=int(first.parts[0][1].shape[0]),
            difference=Late(differences.amax()),
        )

    def _made_at(self, keys: list[int]) -> Place | None:
        """Where the first of these layers was made."""
        for module, place in list(self._places.items()):
            for tensor in (getattr(module, "weight", None), getattr(module, "running_mean", None)):
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in keys and place is not None:
                    return place
        return None


class _AtAttempt:
    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def before(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        self._statistics.attempted(ident)

    def after(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        pass


def _is_group(layer: _Layer) -> bool:
    micros = {micro for micro, _, _ in layer.parts}
    shapes = {x.shape[1:] for _, x, _ in layer.parts}
    return len(micros) == len(layer.parts) > 1 and len(shapes) == 1


def _difference(layer: _Layer) -> torch.Tensor:
    """Gradient of the input with the group's own statistics against that with each micro-batch's: relative norm."""
    inputs = [x.float() for _, x, _ in layer.parts]
    gradients = [g.float() for _, _, g in layer.parts]
    whole = _backward(torch.cat(inputs), torch.cat(gradients), layer)
    parts = torch.cat([_backward(x, g, layer) for x, g in zip(inputs, gradients, strict=True)])
    difference: torch.Tensor = (whole - parts).norm() / parts.norm().clamp(min=1e-30)
    return difference


def _backward(x: torch.Tensor, gradient: torch.Tensor, layer: _Layer) -> torch.Tensor:
    """Of ``(x - mean) / sqrt(var + eps) * weight`` with the statistics of ``x`` over all but dimension 1."""
    dims = [d for d in range(x.dim()) if d != 1]
    mean = x.mean(dims, keepdim=True)
    invstd = (x.var(dims, unbiased=False, keepdim=True) + layer.eps).rsqrt()
    hat = (x - mean) * invstd
    inner = gradient - gradient.mean(dims, keepdim=True) - hat * (gradient * hat).mean(dims, keepdim=True)
    if layer.weight is not None:
        inner = inner * layer.weight.detach().float().reshape([-1 if d == 1 else 1 for d in range(x.dim())])
    return inner * invstd
