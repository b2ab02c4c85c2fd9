"""From what hooks saw to events: late values are read together, then events go out in order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from halfstep.events import Event, Fault, Place


class Late:
    """A value still on its device. ``then`` makes the event's field of the number read."""

    __slots__ = ("tensor", "then")

    def __init__(self, tensor: torch.Tensor, then: Callable[[float], Any] = float) -> None:
        self.tensor = tensor.detach()
        self.then = then


class Draft:
    """An event about to be: its class, its fields (some of them `Late`), and what must be read to finish it."""

    __slots__ = ("fields", "finish", "kind", "tensors")

    def __init__(self, kind: type[Event], fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = fields
        self.tensors: Sequence[torch.Tensor] = ()
        self.finish: Callable[[dict[str, Any], Sequence[float]], None] | None = None


class Stream:
    """Drafts in, events out, in the order they happened.

    Nothing is read from a device before ``hold`` drafts have come or ``patience`` seconds have passed (or `flush` is
    called): then all late values are read in one go per device, so that watching adds no host read per micro-batch
    or update. ``released`` is called after the last of them.
    """

    def __init__(
        self,
        release: Callable[[Event], None],
        released: Callable[[], None],
        hold: int = 512,
        patience: float = 2.0,
    ) -> None:
        self._release = release
        self._released = released
        self._hold = hold
        self._patience = patience
        self._flushed = time.monotonic()
        self._drafts: list[Draft] = []
        self._number = itertools.count(1)
        self._flushing = False
        self.micro = 0

    def emit(self, kind: type[Event], /, *, at: Place | None = None, **fields: Any) -> Draft:
        """Note that this happened now. Fields may be `Late`; the draft may be completed until it is released."""
        draft = Draft(kind, {"seq": next(self._number), "at": at, "micro": self.micro, **fields})
        self._drafts.append(draft)
        return draft

    def breathe(self) -> None:
        """Between two updates: release what has gathered, if it is much or old."""
        if len(self._drafts) >= self._hold or time.monotonic() - self._flushed > self._patience:
            self.flush()

    def flush(self) -> None:
        """Read what is late and release all drafts."""
        if self._flushing:
            return
        self._flushing = True
        try:
            drafts, self._drafts = self._drafts, []
            late = [v for d in drafts for v in d.fields.values() if isinstance(v, Late) and has_value(v.tensor)]
            whole = [d for d in drafts if all(map(has_value, d.tensors))]
            numbers = iter(read([v.tensor for v in late] + [t for d in whole for t in d.tensors]))
            known = {id(v): v.then(next(numbers)) for v in late}
            for draft in drafts:
                fields = {k: known.get(id(v)) if isinstance(v, Late) else v for k, v in draft.fields.items()}
                draft.fields = fields
            ready = set(map(id, whole))
            for draft in drafts:
                own = [next(numbers) for _ in draft.tensors] if id(draft) in ready else []
                try:
                    if draft.finish is not None and id(draft) in ready:
                        draft.finish(draft.fields, own)
                    event = draft.kind(**draft.fields)
                except Exception as error:  # a failure of ours must not reach the run
                    words = f"{type(error).__name__}: {error}"[:500]
                    event = Fault(seq=draft.fields["seq"], where=f"finishing {draft.kind.__name__}", message=words)
                self._release(event)
            self._released()
        finally:
            self._flushing = False
            self._flushed = time.monotonic()


def norms_of(tensors: list[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """The norm of each tensor, computed in FP32, or in FP64 where one of them is: a float64 norm is not narrowed."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.stack([n.to(wide) for n in torch._foreach_norm(tensors, order, dtype=wide)])


def on_host(tensor: torch.Tensor) -> float:
    """The number in a one-element tensor that lies on the host: nothing is dispatched for it, nothing waited for."""
    value = tensor.tolist()
    while isinstance(value, list):
        value = value[0]
    return float(value)


def has_value(tensor: torch.Tensor) -> bool:
    """Whether there is a number to be read: not in fake or distributed tensors, nor inside a function transform."""
    if type(tensor) is torch.Tensor:
        return tensor.device.type != "meta" and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not isinstance(tensor, FakeTensor) and not is_traceable_wrapper_subclass(tensor)


def read(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The numbers of 0-dim tensors: one transfer a device, none of torch's per-scalar reads."""
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():  # one that makes tensors fake, say
            return _read(tensors)
    return _read(tensors)


def _read(tensors: Sequence[torch.Tensor]) -> list[float]:
    out: list[float] = [0.0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    for places in by_device.values():
        with torch.no_grad():
            wide = torch.float32 if tensors[places[0]].device.type == "mps" else torch.float64
            together = torch.stack([tensors[i].detach().reshape(()).to(wide) for i in places])
        for i, number in zip(places, together.tolist(), strict=True):
            out[i] = number
    return out
