"""What is taken at one place of the graph while backward runs, and the arithmetic that makes a Term of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from halfstep.weigh.term import Term
from halfstep.weigh.walk import Place, saved

_REDUCTIONS = ("none", "mean", "sum")
_EXACT = 1 << 24  # float32 counts exactly up to here


class Site:
    """One hooked place. Holds no node: a hook that did would keep the whole graph alive."""

    def __init__(self, place: Place, detail: bool) -> None:
        node = place.node
        self.name = place.name
        self.kind = place.kind
        self.positions = math.prod(place.shape)
        self.targets = place.shape[0] if place.shape else 1
        self.parts = place.parts
        self.weighted = place.weighted
        self.logits = place.logits  # dropped once the places of one term are joined
        self.reduction = "none"
        self.failure: str | None = None
        self._detail = detail
        self._share = place.share
        self._classes = place.classes
        self._dim = place.dim
        self._slot = place.slot
        self._grad: torch.Tensor | None = None  # the scalar that decides every coefficient
        self._stats: list[torch.Tensor] = []  # total, count, mass, [smallest, largest], [weight sum]
        self._count: torch.Tensor | int | None = self.positions  # supervised, where the target tells
        self._weights: torch.Tensor | None = None  # their weight sum
        self._has_weights = False
        self._target: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._ignore: int | None = None
        self._blind = False  # the target exists and cannot be read
        self._seen = False
        if place.kind == "loss":
            self._hold(node)
        self._scalar = place.kind != "soft" and (place.above is not None or self.reduction != "none")
        self._index = place.index
        if self._scalar or self.kind == "soft":
            self._settle()
        if place.kind == "soft":
            self._handle = node.register_hook(self._after)
            return
        if place.above is not None and self._scalar and self.reduction == "none":
            node, self._index = place.above, 0
        self._handle = node.register_prehook(self._before)

    def _hold(self, node: Any) -> None:
        """Take what tells supervised positions from the others: no copies, nothing that holds a graph."""
        code = getattr(node, "_saved_reduction", 0)
        self.reduction = _REDUCTIONS[code]
        if self.name in ("cross_entropy", "nll"):
            self._target, weight = saved(node, "target"), getattr(node, "_raw_saved_weight", None)
            self._blind = self._target is None
            self._ignore = node._saved_ignore_index
            self._ignore = self._ignore - (1 << 64) if self._ignore >= 1 << 63 else self._ignore
            self._weight = saved(node, "weight")
            self._has_weights = self._weight is not None or (weight is not None and weight.unpack_hook is not None)
            if code:
                total = saved(node, "total_weight")
                if self._has_weights:
                    self._weights = total
                elif total is not None and total.dtype in (torch.float32, torch.float64) and self.positions <= _EXACT:
                    self._count, self._target, self._blind = total, None, False
        elif self.name.startswith("bce"):
            self._weight = saved(node, "weight")
            raw = getattr(node, "_raw_saved_weight", None)
            self._blind = self._weight is None and raw is not None and raw.unpack_hook is not None
            self._has_weights = self._weight is not None

    def _settle(self) -> None:
        """Count supervised positions from the target alone, on its device."""
        if self._blind:
            self._count = None
        with torch.no_grad():
            valid = self._valid()
            if valid is not None:
                self._count = valid.sum()
                if self._weights is None and self._has_weights and not self._blind:
                    self._weights = self._weight_of(valid)
        self._target = self._weight = None

    def _valid(self) -> torch.Tensor | None:
        if self._target is not None and self._ignore is not None:
            return self._target != self._ignore
        if self._weight is not None and self.name.startswith("bce"):
            return self._weight != 0
        return None

    def _weight_of(self, live: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over live positions of their class weight (BCE: their own), times ``factor`` where given."""
        assert self._weight is not None
        weight = self._weight
        if self._target is not None:
            weight = weight[torch.where(live, self._target, 0)]
        weight = weight if factor is None else weight * factor
        return torch.where(live, weight, 0).sum(dtype=_wide(weight))

    def _before(self, grads: Sequence[torch.Tensor | None]) -> None:
        grad = grads[self._index] if self._index < len(grads) else None
        if grad is None or self._seen:
            return
        self._seen = True
        if self._scalar:
            self._grad = grad.detach() if grad.requires_grad else grad
            return
        self._guard(grad)

    def _after(self, grad_inputs: Sequence[torch.Tensor | None], _: Any) -> None:
        grad = grad_inputs[self._slot]
        if grad is None or self._seen:
            return
        self._seen = True
        self._guard(grad)

    def _guard(self, grad: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                self._measure(grad.detach())
        except Exception as error:  # whatever it is: the backward it happens in is not ours to end
            self.failure = f"{type(error).__name__} while weighing {self.name}"
        self._target = self._weight = None

    def _measure(self, grad: torch.Tensor) -> None:
        if self.kind == "soft":
            grad = grad.sum(self._dim, dtype=_wide(grad) if grad.dtype == torch.float64 else torch.float32)
        size = grad.abs()
        wide = _wide(size)
        live = (size > 0) & (size < math.inf)
        valid = self._valid()
        mass = size.sum(dtype=wide)
        total = mass
        if valid is not None:
            valid = valid.reshape(size.shape) if valid.numel() == size.numel() else valid.expand(size.shape)
            live = live & valid
            total = torch.where(valid, size, 0).sum(dtype=wide)
        self._stats = [total, live.sum(), mass]
        if self._detail and size.numel():
            lowest = torch.where(live, size, math.inf).amin()
            self._stats += [lowest, torch.where(live, size, 0).amax()]
        if self._weight is not None and not self._blind:
            if self._target is not None:
                self._target = self._target.reshape(size.shape)
                self._stats.append(self._weight_of(live, size))
            else:
                self._weight = self._weight.expand(size.shape)
            self._weights = self._weight_of(live)

    def remove(self) -> None:
        self._handle.remove()
        self._target = self._weight = None

    def late(self) -> list[torch.Tensor]:
        if self.failure is not None or not self._seen:
            return []
        held = [self._grad] if self._scalar else list(self._stats)
        held += [t for t in (self._count if self._scalar else None, self._weights) if isinstance(t, torch.Tensor)]
        return [t for t in held if t is not None]

    def term(self, values: list[float]) -> Term | None:
        """The term, from the numbers that ``late()`` gave, in its order; None where no gradient came by."""
        if self.failure is not None or not self._seen:
            return None
        return self._uniform(list(values)) if self._scalar else self._varied(list(values))

    def _uniform(self, values: list[float]) -> Term:
        grad = abs(values.pop(0))
        count = self._count
        supervised = round(values.pop(0)) if isinstance(count, torch.Tensor) else count
        weight_sum = values.pop(0) if self._weights is not None else None
        if self._has_weights is False and supervised is not None:
            weight_sum = float(supervised)
        positions = self.positions
        share, ignored = 0.0, 0.0
        if self.kind == "loss" and self.reduction == "mean" and self.name in ("cross_entropy", "nll"):
            divisor, total = weight_sum, grad
        else:
            each = grad * self._classes * (1.0 / max(positions, 1) if self.reduction == "mean" else self._share)
            divisor = float(positions) if self.reduction == "mean" else (1 / each if each else None)
            by_class = self._has_weights and not self.name.startswith("bce")
            units = weight_sum if by_class else supervised
            total = math.nan if units is None else each * units
            share = each * positions
            if supervised is not None and self.reduction != "sum":
                ignored = 1 - supervised / positions if positions and share else 0.0
        if supervised == 0:
            total, divisor = math.nan, None
        return self._make(supervised, weight_sum, divisor, total, 0.0, ignored)

    def _varied(self, values: list[float]) -> Term:
        mine, values = values[: len(self._stats)], values[len(self._stats) :]
        total, count, mass, *rest = mine
        factor = float(self._classes)
        live = total
        low = high = math.nan
        if self._detail and len(rest) >= 2:
            low, high, *rest = rest
        by_class = bool(rest)
        supervised = None if self._blind else round(count)
        weight_sum: float | None = values[0] if values else None
        if not self._has_weights and supervised is not None:
            weight_sum = float(supervised)
        plain = total * factor
        total = (rest[0] if by_class else total) * factor
        ignored = 1 - live / mass if mass > 0 and math.isfinite(mass) else 0.0
        each = plain / supervised if supervised else math.nan
        spread = (high - low) * factor / each if supervised and each else math.nan
        divisor = 1 / each if supervised and each else None
        if supervised == 0 and not math.isfinite(mass):
            total = math.nan
        return self._make(supervised, weight_sum, divisor, total, spread if supervised else 0.0, ignored)

    def _make(
        self,
        supervised: int | None,
        weight_sum: float | None,
        divisor: float | None,
        total: float,
        spread: float,
        ignored: float,
    ) -> Term:
        return Term(
            loss=self.name,
            reduction=self.reduction,
            positions=self.positions,
            supervised=supervised,
            weight_sum=weight_sum,
            divisor=divisor,
            total=total,
            coefficient=total / supervised if supervised else math.nan,
            spread=spread,
            ignored_share=min(max(ignored, 0.0), 1.0),
            targets=self.targets,
            soft=self.kind in ("soft", "classes"),
            parts=self.parts,
        )


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Sums are taken in FP64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
