"""What one backward does: the loss is checked, scaled, normalised by its weight, and its gradients are added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine import graph
from halfstep.engine.group import Group
from halfstep.engine.late import host
from halfstep.engine.ledger import Contribution, Ledger, Mode, Weight, host_weights
from halfstep.engine.reading import read_weight
from halfstep.engine.replicas.replicas import Replicas
from halfstep.engine.scale import LossScale
from halfstep.engine.terms import TermBuffers
from halfstep.errors import GroupError, MisuseError, PolicyError, WeightError, counted
from halfstep.events.audience import LISTENERS
from halfstep.weigh import Weighing, weigh

_HALF = (torch.float16, torch.bfloat16)
_SEEDS = 512

Normalised = tuple[Mode, str, tuple[Weight, ...], tuple[Weight, ...] | None]
"""(how, where the weights came from, factor of each term, weight of each term)."""


class Contributor:
    """Runs backwards for one manager and keeps its ledger."""

    def __init__(self, scale: LossScale, replicas: Replicas, *, activated: bool) -> None:
        self.ledger = Ledger()
        self.buffers = TermBuffers()
        self.weigh = True
        """Whether contributions are weighed for now, to verify what was declared."""
        self.look = True
        """Whether the graph under the next losses is looked at: which parameters does it reach?"""
        self.sight: graph.Sight | None = None
        """Operators and dtypes under the very first loss."""
        self.leaves: list[Tensor] = []
        """What the last graph that was looked at reaches, until the update."""
        self.counted_examples: str | None = None
        """Why examples are counted although weights were to be read from the loss; None: they are read."""
        self.host = True
        """Whether device values can be read without waiting: the device is a CPU."""
        self.scale = scale
        self.replicas = replicas
        self._activated = activated
        self._seeds: dict[tuple[Any, ...], Tensor] = {}

    def drop(self) -> None:
        """Forget what is pending; gradients are cleared where the graph was looked at."""
        for leaf in self.leaves:
            leaf.grad = None
        self.leaves = []
        self.ledger.clear()
        self.buffers.clear()

    # --- checks that change nothing ---

    def losses(self, loss: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The terms of a loss, each a scalar that can be differentiated in enough precision."""
        losses = tuple(loss) if isinstance(loss, (list, tuple)) else (loss,)
        if not losses:
            raise MisuseError("backward was given an empty list of losses", "at least one scalar loss")
        for one in losses:
            if not isinstance(one, Tensor):
                raise MisuseError(
                    f"backward was given a {type(one).__name__}", "a scalar loss tensor, or a list of them"
                )
            if one.numel() != 1:
                raise MisuseError(
                    f"the loss has shape {tuple(one.shape)}: backward needs one number",
                    "reduce it (mean with its weight, or sum), or give its terms as a list of scalars",
                )
            if one.is_complex():
                raise MisuseError(
                    f"the loss is complex ({str(one.dtype).removeprefix('torch.')}): it has no least value",
                    "a real number of it: loss.real, or loss.abs()",
                )
            if not one.requires_grad:
                raise MisuseError(
                    "the loss does not depend on anything that requires a gradient",
                    "compute it outside torch.no_grad(), without detach(), from parameters with requires_grad",
                )
            if self._activated and one.dtype in _HALF:
                scaled = f", and times a loss scale of {self.scale.value:g} it would be inf in FP16"
                raise MisuseError(
                    f"the loss is a {str(one.dtype).removeprefix('torch.')} scalar: it keeps three digits"
                    + (scaled if self.scale.is_enabled() else ""),
                    "compute the loss in FP32: loss_fn(outputs.float(), targets)",
                )
        return losses

    def expect(self, group: Group[Any]) -> None:
        """Refuse a backward that has no place in the open group."""
        if group.exhausted:
            raise GroupError(
                f"backward was called after group {group.index + 1} had closed: its {len(group)} micro-batches are all "
                "contributed, and its denominator holds no more",
                "call manager.step first, or make the backward part of the loop over the group",
            )
        if group.position < 0:
            raise GroupError(
                f"backward was called before the first micro-batch of group {group.index + 1} was taken",
                "for batch in group: … manager.backward(loss)",
            )

    def require_only(
        self, losses: tuple[Tensor, ...], mode: Mode, only: list[Tensor] | None, group: Group[Any] | None
    ) -> None:
        """Refuse a second backward of one micro-batch where the sum of weights would count its elements twice.

        Two losses of the same elements, or one loss over two parts of them: the graph cannot tell which. Backwards
        that reach parameters of their own (``inputs=``, or graphs apart) have denominators of their own.
        """
        if group is None or mode != "along":
            return
        before = [c for c in self.ledger.pending if c.micro_batch == group.position and not c.empty]
        if not before:
            return
        reached = frozenset(map(id, graph.look(losses).leaves if only is None else only))
        if any(c.reaches(reached) for c in before):
            raise WeightError(
                f"micro-batch {group.position + 1} of group {group.index + 1} was given a second backward: its "
                "weights are added up as they come, and its elements would count twice in W",
                "two losses: one backward for both, manager.backward([loss_1, loss_2]); or groups(loader, size, "
                "weight=…), which knows W ahead and takes any number; two parts of a micro-batch: smaller ones in the "
                "loader",
            )

    def normalise(self, losses: tuple[Tensor, ...], weight: Any, group: Group[Any] | None) -> Normalised:
        """How this contribution is normalised. Changes nothing but the anchor of counted weights."""
        if group is not None and group.filling and group.micro_weights is None:
            nothing: tuple[Weight, ...] = (0.0,) * len(losses)
            if group.reduction == "none":
                return "plain", "none: as the caller scaled it", nothing, None
            return self._along("counted along", nothing, group.reduction, len(group))
        if group is None:
            if weight is None:
                return "plain", "none: as the caller scaled it", (1.0,) * len(losses), None
            return self._along("counted along", self._declared(weight, len(losses)), "mean", None)
        if group.micro_weights is not None:
            if weight is not None:
                raise MisuseError(
                    "backward was given a weight inside a group that has weights already",
                    "leave weight= out of backward, or out of manager.groups",
                )
            return self._ahead(losses, group)
        if group.reduction == "none":
            if weight is not None:
                raise MisuseError(
                    'backward was given a weight in a group of reduction="none", whose losses are divided already',
                    "leave one of them out",
                )
            return "plain", "none: as the caller scaled it", (1.0,) * len(losses), None
        if weight is not None:
            return self._along("counted along", self._declared(weight, len(losses)), group.reduction, len(group))
        weights = self._read(losses, group)
        source = "read from the loss" if self.counted_examples is None else "examples, unverified"
        return self._along(source, weights, group.reduction, len(group))

    @staticmethod
    def _declared(weight: Any, terms: int) -> tuple[Weight, ...]:
        if type(weight) in (int, float) and terms == 1 and 0.0 <= weight < math.inf:
            return (float(weight),)
        entries = list(weight) if isinstance(weight, (list, tuple)) else [weight]
        if len(entries) == 1 and terms > 1:
            entries = entries * terms
        if len(entries) != terms:
            raise WeightError(
                f"backward was given {counted(terms, 'loss')} and {counted(len(entries), 'weight')}",
                "one weight for each loss",
            )
        # Read even where that waits for a device: a backward that weighs 0 must not run, its gradient may be NaN.
        return host_weights([entries])[0]

    def _ahead(self, losses: tuple[Tensor, ...], group: Group[Any]) -> Normalised:
        assert group.micro_weights is not None
        assert group.weights is not None
        own, totals = group.micro_weights[group.position], group.weights
        if len(own) == 1 and len(losses) > 1:
            own, totals = own * len(losses), totals * len(losses)
        if len(own) != len(losses):
            raise WeightError(
                f"backward was given {counted(len(losses), 'loss')}, the group's weight function gave "
                f"{counted(len(own), 'weight')}",
                "one weight for each term, in the same order",
            )
        if group.reduction == "none":
            factors: tuple[Weight, ...] = tuple(0.0 if w == 0.0 else 1.0 for w in own)
        elif group.reduction == "sum":
            factors = tuple(0.0 if w == 0.0 else 1.0 / total for w, total in zip(own, totals, strict=True))
        else:
            factors = tuple(0.0 if w == 0.0 else w / total for w, total in zip(own, totals, strict=True))
        return "ahead", "counted ahead", factors, own

    def _along(self, source: str, weights: tuple[Weight, ...], reduction: str, size: int | None) -> Normalised:
        if not self.replicas.alone:
            self.agree(weights, size)
        reference = self.ledger.anchor(weights, size)
        if reduction == "sum":
            factors = tuple(0.0 if isinstance(w, float) and w == 0.0 else 1.0 / reference for w in weights)
            return "along", source, factors, weights
        return "along", source, tuple(w / reference for w in weights), weights

    def agree(self, weights: tuple[Weight, ...], size: int | None) -> None:
        """Replicas divide by one reference, whatever each of them weighs first."""
        self.replicas.require_known("a weight was given outside manager.groups")
        ledger = self.ledger
        if not self.replicas.local and not ledger.anchored:
            first = max(float(w) for w in weights) if self.replicas.scale is None else 0.0
            ledger.reference = self.replicas.reference(first, size or 1)
            ledger.anchored = True

    def _read(self, losses: tuple[Tensor, ...], group: Group[Any]) -> tuple[Weight, ...]:
        """Weights from the graphs of the losses; the examples of the micro-batch where they cannot be read."""
        if self.counted_examples is None:
            readings = [read_weight(loss, group.reduction, host=self.host) for loss in losses]
            weights = [reading.weight for reading in readings]
            if all(weight is not None for weight in weights):
                return tuple(weight for weight in weights if weight is not None)
            why = next(reading.why_not for reading in readings if reading.weight is None)
            if any(not c.empty for c in self.ledger.pending):
                raise WeightError(
                    f"the weight of micro-batch {group.position + 1} cannot be read from its loss ({why}), those of "
                    "the group's earlier ones could",
                    "groups(loader, size, weight=…) with the number of supervised elements",
                )
            self.counted_examples = why
        count = group.example_counts[group.position]
        return (1.0 if count is None else float(count),) * len(losses)

    # --- backward ---

    def run(
        self,
        losses: tuple[Tensor, ...],
        mode: Mode,
        source: str,
        factors: tuple[Weight, ...],
        weights: tuple[Weight, ...] | None,
        *,
        only: list[Tensor] | None,
        retain_graph: bool | None,
        create_graph: bool,
        examples: int | None,
        micro_batch: int,
        grouped: bool,
    ) -> Contribution:
        """Add one contribution to the gradients and to the ledger."""
        live = [i for i, factor in enumerate(factors) if not (isinstance(factor, float) and factor == 0.0)]
        contribution = Contribution(
            mode,
            source,
            tuple(host(loss) for loss in losses) if self.host else tuple(loss.detach().reshape(()) for loss in losses),
            factors,
            weights,
            examples,
            micro_batch,
            not live,
            None if only is None else frozenset(map(id, only)),
        )
        if not live:
            self.replicas.nothing(losses, grouped=grouped)
            self.ledger.pending.append(contribution)
            return contribution
        sight: graph.Sight | None = None
        buffered = mode == "along" and len(losses) > 1
        if self.look or buffered:
            sight = graph.look([losses[i] for i in live], operators=self.sight is None)
            known = sight.whole and not self.replicas.sharded  # else the graph holds passing parameters
            contribution.leaves = frozenset(map(id, sight.leaves)) if known else None
        weighings = [weigh(losses[i]) for i in live] if self.weigh else []
        roots = [losses[i] for i in live]
        averaging = 1 if mode == "plain" else self.replicas.averaging
        seeds = [self.seed(losses[i], factors[i] * averaging) for i in live]
        for listener in LISTENERS:
            listener.contributing(self.scale if self.scale.is_enabled() else None, undivided=mode == "along")
        concerned = [] if self.replicas.local else self.replicas.concerned(losses)
        answered = nullcontext() if self.replicas.local else self.replicas.answered("gradients")
        try:
            with answered:
                if buffered:
                    assert sight is not None
                    leaves = sight.leaves
                    if only is not None:
                        leaves = [leaf for leaf in leaves if any(leaf is other for other in only)]
                    fed = bool(self.replicas.wrappers())  # a reducer would wait for what only a later term reaches
                    retain = retain_graph or fed
                    self.buffers.backward(
                        roots, seeds, live, leaves, only, retain_graph=retain, create_graph=create_graph, apart=fed
                    )
                    if fed:
                        self.replicas.nothing(losses, grouped=True)
                else:
                    torch.autograd.backward(roots, seeds, retain_graph, create_graph, inputs=only)
        except BaseException:
            for weighing in weighings:
                weighing.remove()
            raise
        finally:
            for listener in LISTENERS:
                listener.contributed()
        if not self.replicas.local:
            self.replicas.done(concerned)
        if weighings:
            self._keep(contribution, weighings, [factors[i] * averaging for i in live])
        if sight is not None:
            if self.sight is None:
                self.sight = graph.Sight([], sight.operators, sight.opaque)
            self.leaves = sight.leaves
        self.ledger.pending.append(contribution)
        return contribution

    def _keep(self, contribution: Contribution, weighings: list[Weighing], factors: list[Weight]) -> None:
        """What weighing found, each term beside the factor its root got."""
        scale = self.scale.value
        reasons = [w.opaque for w in weighings if w.opaque is not None]
        contribution.opaque = "; ".join(reasons) or None
        if contribution.opaque is None:
            contribution.terms = tuple(
                (term, (host(f) if isinstance(f, Tensor) else f) * scale)
                for weighing, f in zip(weighings, factors, strict=True)
                for term in weighing.read()
            )

    def seed(self, loss: Tensor, factor: Weight) -> Tensor:
        """The gradient that enters the graph at a loss: ``factor`` times the loss scale."""
        scale = self.scale
        if scale.is_enabled():
            tensor = scale.on(loss.device)
            if self.host and isinstance(factor, float):
                factor = factor * host(tensor)
            else:
                return _shaped(tensor if isinstance(factor, float) and factor == 1.0 else tensor * factor, loss)
        if isinstance(factor, Tensor):
            return _shaped(factor, loss)
        key = (factor, loss.dtype, loss.device, loss.shape)
        seed = self._seeds.get(key)
        if seed is None:
            if len(self._seeds) >= _SEEDS:
                self._seeds.clear()
            seed = self._seeds[key] = torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)
        return seed


def inputs_of(inputs: Any) -> list[Tensor] | None:
    """``inputs=`` as given to backward -> the tensors: one, an iterable, or a module's parameters that train."""
    if inputs is None:
        return None
    if isinstance(inputs, (Tensor, nn.Module)):
        inputs = [inputs]
    tensors: list[Tensor] = []
    entries = inputs if isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes)) else [inputs]
    for entry in entries:
        if isinstance(entry, nn.Module):
            tensors.extend(p for p in entry.parameters() if p.requires_grad)
        elif isinstance(entry, Tensor) and entry.requires_grad:
            tensors.append(entry)
        elif isinstance(entry, Tensor):
            raise PolicyError(
                f"inputs= holds a tensor of shape {tuple(entry.shape)} that requires no gradient",
                "parameters that train, or the module they are in; requires_grad_() for an input before the forward",
            )
        else:
            raise PolicyError(
                f"inputs= was given {entry!r}, of type {type(entry).__name__}"[:200],
                "the module, or the parameters, that this loss may add gradients to",
            )
    if not tensors:
        raise PolicyError("inputs= holds no tensor", "the parameters this loss may add gradients to")
    return tensors


def _shaped(seed: Tensor, loss: Tensor) -> Tensor:
    if seed.dtype != loss.dtype or seed.device != loss.device:
        seed = seed.to(device=loss.device, dtype=loss.dtype)
    return seed if seed.shape == loss.shape else seed.reshape(loss.shape)
