"""What is taken at one place of the graph while backward runs: a few scalars, read late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from halfstep.weigh.nodes import difference, is_hidden, saved
from halfstep.weigh.term import Reading
from halfstep.weigh.walk import Place

_REDUCTIONS = ("none", "mean", "sum")
_EXACT = 1 << 24  # float32 counts exactly up to here
_FEW = 1 << 16  # below this a sum in FP64 costs nothing
_BY_TARGET = ("cross_entropy", "nll")


class Site:
    """One hooked place. Holds no node: a hook that did would keep the whole graph alive.

    Where one scalar gradient decides every coefficient, that scalar is kept as it is ("uniform"); else the vector
    that arrives is reduced on its device. What tells supervised positions from others (targets, element weights) is
    held until then at the latest.
    """

    def __init__(self, place: Place, detail: bool, group: int | None) -> None:
        node = place.node
        self.failure: str | None = None
        self._name, self._kind, self._shape = place.name, place.kind, place.shape
        self._positions = math.prod(place.shape)
        self._parts, self._share, self._classes, self._empty = place.parts, place.share, place.classes, place.empty
        self._dim, self._slot = place.dim, place.slot
        self._group = group
        self._detail = detail
        self._copies = 1
        self._reduction = "none"
        self._seen = False
        self._numbers: dict[str, torch.Tensor] = {}  # what is read late
        self._blind = False  # there are targets or element weights, behind somebody's unpack hook
        self._weighted = place.weight is not None  # by class, or by element
        self._within = place.weighted
        self._target: torch.Tensor | None = None
        self._weight: torch.Tensor | None = place.weight
        self._ignored: int | None = None
        if place.kind == "loss":
            self._hold(node)
        if place.mask is not None and detail:
            self._hold_mask(node, place.mask)
        if place.signs is not None and detail:
            self._numbers["downmost"], self._numbers["upmost"] = place.signs.amin(), place.signs.amax()
        self._uniform = place.kind not in ("soft", "factor") and (place.above is not None or self._reduction != "none")
        self._index = place.index
        if self._uniform:
            if self._target is not None or self._weight is not None:
                self._settle()
            if self._reduction == "none":
                node, self._index = place.above, 0
        self._handle = node.register_hook(self._after) if place.kind == "soft" else node.register_prehook(self._before)

    def _hold(self, node: Any) -> None:
        """Take what tells supervised positions and weights: no copies, nothing that holds a graph."""
        code = getattr(node, "_saved_reduction", 0)
        self._reduction = _REDUCTIONS[code]
        if self._name in _BY_TARGET:
            ignored: int = node._saved_ignore_index  # unsigned: -100 arrives as 2^64 - 100
            self._ignored = ignored if ignored < 1 << 63 else ignored - (1 << 64)
            self._weighted = is_hidden(node, "weight") or saved(node, "weight") is not None
            total = saved(node, "total_weight") if code else None
            if self._weighted and total is not None:
                self._numbers["weights"] = total
            elif total is not None and self._positions <= _EXACT and total.dtype in (torch.float32, torch.float64):
                self._numbers["count"] = total
                return
            self._target, self._weight = saved(node, "target"), saved(node, "weight")
            self._blind = self._target is None or is_hidden(node, "weight")
        elif self._name.startswith("bce"):
            weight = saved(node, "weight")
            self._blind = is_hidden(node, "weight")
            self._weighted = weight is not None
            self._weight = None if weight is None else weight.detach().expand(self._shape)
        elif self._name == "multi_margin":
            self._weighted = is_hidden(node, "weight") or saved(node, "weight") is not None
        elif self._name == "ctc":
            lengths = getattr(node, "_saved_target_lengths", None) if not is_hidden(node, "target_lengths") else None
            self._weighted = True
            if lengths is not None:
                self._weight = torch.as_tensor(lengths).reshape(self._shape)

    def _hold_mask(self, node: Any, mask: torch.Tensor) -> None:
        """Which elements a mask on the loss's inputs leaves, and whether it zeroed both sides elsewhere."""
        apart = difference(node)
        if apart is None or apart.numel() != mask.numel():
            return
        size = mask.abs() if mask.dtype.is_floating_point else mask.float()
        self._numbers["mask least"], self._numbers["mask most"] = _smallest(size), size.amax()
        self._numbers["mask count"] = _sum(size.sign())
        self._numbers["mask apart"] = (apart.abs() * (size == 0)).amax()

    def _valid(self) -> torch.Tensor | None:
        """Where elements are supervised, as far as targets and weights tell; None: everywhere, or unknown."""
        if self._target is not None and self._ignored is not None:
            return self._target != self._ignored
        return self._weight != 0 if self._weight is not None and self._name.startswith("bce") else None

    def _weight_each(self, live: torch.Tensor | None) -> torch.Tensor:
        """The weight of each element: its class's, its own, or a CTC sequence's target length."""
        assert self._weight is not None
        if self._target is None:
            return self._weight
        return self._weight[self._target if live is None else torch.where(live, self._target, 0)]

    def _settle(self) -> None:
        """Count supervised positions, and their weights, from the targets alone, on their device."""
        # No grad mode needed: targets and weights are detached.
        valid = None if self._blind or "count" in self._numbers else self._valid()
        if valid is not None:
            self._numbers["count"] = valid.sum()
        if self._kind == "loss" and self._weight is not None and not self._blind and "weights" not in self._numbers:
            each = self._weight_each(valid)
            self._numbers["weights"] = _sum(each if valid is None else torch.where(valid, each, 0))
        self._target = self._weight = None

    def _before(self, grads: Sequence[torch.Tensor | None]) -> None:
        grad = grads[self._index]
        if grad is None or self._seen:
            return
        self._seen = True
        if self._uniform:
            grad = grad.detach() if grad.requires_grad else grad
            self._numbers["grad"] = grad.reshape(()) if grad.dim() else grad
        else:
            self._take(grad)

    def _after(self, grad_inputs: Sequence[torch.Tensor | None], _: Any) -> None:
        grad = grad_inputs[self._slot]
        if grad is not None and not self._seen:
            self._seen = True
            self._take(grad)

    def _take(self, grad: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                self._measure(grad.detach())
        except Exception as error:  # whatever it is, the backward that it happens in is not ours to end
            self.failure = f"{type(error).__name__} while weighing {self._name}"
        self._target = self._weight = None

    def _measure(self, grad: torch.Tensor) -> None:
        numbers = self._numbers
        heavy: torch.Tensor | None = None
        each: torch.Tensor | None = None
        grad = grad if grad.dtype == torch.float64 else grad.float()
        if self._kind == "soft":
            size = grad.sum(self._dim).abs()
            if self._weight is not None:
                size, heavy = self._soft_weights(grad, size)
                each = torch.where(size > 0, heavy / size, 0)
        elif self._kind == "loss":
            size = grad.abs().reshape(self._shape)
        elif self._kind == "factor":
            size = grad.abs()
        else:
            for dim in range(grad.dim()):
                if grad.stride(dim) == 0 and grad.size(dim) > 1:  # expanded: the same numbers again
                    self._copies *= grad.size(dim)
                    grad = grad.narrow(dim, 0, 1)
            size = grad.abs()
        numbers["mass"] = plain = _sum(size)
        if self._name in _BY_TARGET and self._kind != "soft" and grad.numel():
            numbers["downmost"], numbers["upmost"] = grad.amin(), grad.amax()
        if self._kind == "factor":
            assert self._weight is not None
            constants = self._weight.to(size.dtype).abs()
            numbers["least"], numbers["most"] = _smallest(constants), constants.amax()
            masked = size * constants
            self._add_up("masked ", masked, _sum(masked))
        valid = None if self._blind or self._kind != "loss" else self._valid()
        if valid is not None:
            size = size * valid.reshape(size.shape).to(size.dtype)
            plain = _sum(size)
        live = self._add_up("", size, plain)
        if self._kind == "loss" and not self._blind and self._weight is not None:
            self._target = None if self._target is None else self._target.reshape(size.shape)
            each = self._weight_each(live > 0).to(size.device)
            heavy = None if self._name.startswith("bce") else size * each
        if each is not None:
            numbers["weights"] = _sum(live * each)
        if heavy is not None:
            numbers["heavy"] = _sum(heavy)

    def _add_up(self, which: str, size: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        numbers = self._numbers
        numbers[f"{which}plain"] = plain
        live = size.sign()
        if not self._blind:
            numbers[f"{which}count"] = _sum(live)
        if self._detail and size.numel():
            numbers[f"{which}low"], numbers[f"{which}high"] = _smallest(size), size.amax()
        return live

    def _soft_weights(self, grad: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients without and with the class weights, of which ``grad`` holds the one or the other."""
        assert self._weight is not None
        weight = self._weight.reshape([-1 if dim == self._dim else 1 for dim in range(grad.dim())])
        factor = torch.where(weight != 0, 1 / weight, 0) if self._within else weight
        other = (grad * factor).sum(self._dim, dtype=size.dtype).abs()
        return (other, size) if self._within else (size, other)

    def remove(self) -> None:
        self._handle.remove()
        self._target = self._weight = None

    def late(self) -> list[torch.Tensor]:
        """What is to be read, once the gradient came by."""
        return list(self._numbers.values()) if self._seen and self.failure is None else []

    def reading(self, values: Sequence[float]) -> Reading | None:
        """What was seen, from the numbers of ``late()`` in its order; None where no gradient came by."""
        if not self._seen or self.failure is not None:
            return None
        seen = dict(zip(self._numbers, values, strict=True))
        if seen.get("least", math.nan) == seen.get("most"):  # one value and zeros: a mask, not data
            seen |= {name.removeprefix("masked "): value for name, value in seen.items() if name.startswith("masked ")}
            seen["mass"] = seen["plain"]
        supervised = None if self._blind else self._positions
        if "count" in seen:
            # Nothing finite arrived: 0/0, no element can be told from another.
            supervised = round(seen["count"] * self._copies) if math.isfinite(seen.get("mass", 0.0)) else 0
        weights = seen.get("weights")
        if not self._weighted and supervised is not None:
            weights = float(supervised)
        reading = Reading(
            # Advantages have both signs; masks and weights do not.
            loss="policy_gradient" if seen.get("downmost", 0.0) < 0 < seen.get("upmost", 0.0) else self._name,
            reduction=self._reduction,
            positions=self._positions,
            supervised=supervised,
            weight_sum=weights,
            targets=self._shape[0] if self._shape else 1,
            parts=self._parts,
            kind=self._kind,
            weighted=self._weighted,
            group=self._group,
        )
        if seen.get("mask least", math.nan) == seen.get("mask most") and seen["mask apart"] == 0:
            reading.live = round(seen["mask count"])
        if self._uniform:
            self._spread_evenly(reading, abs(seen["grad"]))
        else:
            factor = float(self._classes)
            reading.plain, reading.mass = seen["plain"] * factor * self._copies, seen["mass"] * factor * self._copies
            reading.total = seen["heavy"] * factor if "heavy" in seen else reading.plain
            mean = reading.plain / supervised if supervised else 0.0
            reading.spread = (seen.get("high", math.nan) - seen.get("low", math.nan)) * factor / mean if mean else 0.0
        if self._empty and not supervised:
            reading.total = reading.plain = math.nan
        return reading

    def _spread_evenly(self, reading: Reading, grad: float) -> None:
        supervised, positions, weights = reading.supervised, self._positions, reading.weight_sum
        if self._reduction == "mean" and self._name in _BY_TARGET:
            reading.total = reading.plain = reading.mass = grad if supervised != 0 else math.nan
            reading.divisor = weights
            return
        mean = self._reduction == "mean"
        coefficient = grad / max(positions, 1) if mean else grad * self._share * self._classes
        reading.divisor = float(positions) if mean else None
        counted = positions if supervised is None else supervised
        reading.plain = coefficient * counted
        reading.mass = reading.plain if self._reduction == "sum" else coefficient * positions
        heavy = weights if self._kind == "loss" and self._name in (*_BY_TARGET, "ctc") else None
        reading.total = reading.plain if heavy is None else coefficient * heavy
        if not positions:
            reading.total = math.nan


def _smallest(size: torch.Tensor) -> torch.Tensor:
    """The smallest that is not 0: zeros are lifted to the largest, in fewer passes than a masked fill takes."""
    high = size.amax()
    return size.sign().mul_(-high).add_(high).add_(size).amin()


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """A sum that counts exactly far beyond 2^24: rows in the tensor's own dtype, then FP64 where the device has it."""
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    if tensor.dim() > 1:
        tensor = tensor.flatten(1).sum(1)
    return tensor.sum(dtype=wide) if tensor.numel() < _FEW else tensor.sum().to(wide)
