"""Small random training runs, driven by the engine and by its slow twin side by side.

The twin (``halfstep.engine.reference``) runs in FP64 on a copy of the model, element by element. Tolerances are law
7's, relative to Σ‖contribution‖.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.engine.manager import MixedPrecisionManager
from halfstep.engine.reference import SGD, Adam, AdamW, LossScale, Reference, ReferenceUpdate, Schedule, Term, norm
from halfstep.engine.update import Update

TIMES = int(os.environ.get("HALFSTEP_SEARCH", "0"))


def examples(count: int) -> Any:
    """So many examples of a property, always the same ones; HALFSTEP_SEARCH=n looks at n times as many new ones."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count * max(TIMES, 1), derandomize=TIMES == 0, deadline=None, suppress_health_check=slow
    )


RELATIVE = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 5e-3, "bf16": 3e-2}
IGNORED = -100
AUXILIARY = 0.3
LAYOUTS = ("one", "groups", "several")  # how parameters are dealt: one group, two groups, two optimizers
FLOWS = ("ahead", "graph", "sum", "divided", "along", "plain")


class Net(nn.Module):
    """Two layers over positions, a norm, and a parameter that never gets a gradient."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.last = nn.Linear(hidden, classes)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


@dataclass
class MicroBatch:
    """``x``: (m, T, width); ``labels``: (m, T), ignored positions -100."""

    x: Tensor
    labels: Tensor

    def live(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclass
class Run:
    """A whole small training run: what is trained, on what, in which groups, how."""

    net: Net
    micro_batches: list[MicroBatch]
    size: int
    flow: str
    max_norm: float | None
    optimizer: tuple[Any, Any, dict[str, Any]]
    lr: float
    decay: float | None
    unit: str
    terms: int = 1
    layout: str = "one"

    def groups(self) -> list[list[MicroBatch]]:
        return [self.micro_batches[k : k + self.size] for k in range(0, len(self.micro_batches), self.size)]

    def __repr__(self) -> str:
        shapes = [f"{tuple(batch.labels.shape)} live {batch.live()}" for batch in self.micro_batches]
        what = f"{self.terms} terms, {self.layout}"
        how = f"max_norm={self.max_norm}, {self.optimizer[0].__name__} {self.optimizer[2]}, lr={self.lr}"
        return f"Run({self.flow}, {what}, size={self.size}, {shapes}, {how}, decay={self.decay}, unit={self.unit})"


OPTIMIZERS: list[tuple[Any, Any, dict[str, Any]]] = [
    (torch.optim.SGD, SGD, {}),
    (torch.optim.SGD, SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, SGD, {"momentum": 0.5, "nesterov": True}),
    # A large eps: Adam divides the gradient by itself, rounding noise included.
    (torch.optim.Adam, Adam, {"eps": 1e-2, "weight_decay": 0.1}),
    (torch.optim.AdamW, AdamW, {"eps": 1e-2}),
    (torch.optim.AdamW, AdamW, {"eps": 1e-2, "amsgrad": True, "betas": (0.5, 0.7)}),
]


@st.composite
def runs(draw: st.DrawFn, *, flows: tuple[str, ...] = FLOWS, most: int = 7, hidden: int | None = None) -> Run:
    """Any small run. Half precision wants ``hidden`` wide: a norm over two values has next to no gradient."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    width, classes = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    hidden = draw(st.integers(2, 5)) if hidden is None else hidden
    net = Net(width, hidden, classes)
    with torch.no_grad():  # moderate logits: the gradient of a position predicted surely is one minus nearly one
        for parameter in net.parameters():
            spread = 0.5 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.5 + spread)
    flow = draw(st.sampled_from(flows))
    count, size = draw(st.integers(1, most)), draw(st.integers(1, 4))
    micro_batches = []
    for k in range(count):
        m, length = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        labels = torch.randint(0, classes, (m, length), generator=generator)
        share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
        labels[torch.rand((m, length), generator=generator) > share] = IGNORED
        if k % size == 0 and flow in ("divided", "plain"):
            labels[0, 0] = 0  # those who divide by W themselves need one
        x = torch.randn((m, length, width), generator=generator)
        live = (labels != IGNORED).nonzero()
        if len(live) and draw(st.integers(0, 7)) == 0:
            x[tuple(live[0])] = draw(st.sampled_from([math.inf, math.nan]))
        micro_batches.append(MicroBatch(x, labels))
    return Run(
        net,
        micro_batches,
        size,
        flow,
        draw(st.sampled_from([None, 1e-3, 0.1, 1.0, 100.0])),
        draw(st.sampled_from(OPTIMIZERS)),
        draw(st.sampled_from([0.01, 0.1])),
        draw(st.sampled_from([None, 0.5, 0.9])),
        draw(st.sampled_from(["applied", "attempted"])),
        1 if flow == "graph" else draw(st.integers(1, 2)),
        draw(st.sampled_from(LAYOUTS)),
    )


# --- runs by hand ----------------------------------------------------------------------------------------------------


def batch(seed: int, m: int = 2, length: int = 3, width: int = 3, classes: int = 4, live: float = 0.7) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (m, length), generator=generator)
    if live < 1:
        labels[torch.rand((m, length), generator=generator) > live] = IGNORED
        labels[0, 0] = 0
    return MicroBatch(torch.randn((m, length, width), generator=generator), labels)


def bad(seed: int) -> MicroBatch:
    """A micro-batch whose gradient is not finite."""
    made = batch(seed)
    made.x[0, 0] = math.inf
    return made


def dead(seed: int) -> MicroBatch:
    """A micro-batch that supervises nothing, and whose features are not even finite."""
    made = batch(seed)
    made.labels.fill_(IGNORED)
    made.x.fill_(math.nan)
    return made


def run_of(micro_batches: list[MicroBatch], size: int, flow: str = "ahead", **changes: Any) -> Run:
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "net": Net(3, 5, 4),
        "micro_batches": micro_batches,
        "size": size,
        "flow": flow,
        "max_norm": 1.0,
        "optimizer": OPTIMIZERS[0],
        "lr": 0.1,
        "decay": 0.5,
        "unit": "applied",
    }
    return Run(**(values | changes))


# --- the twin -----------------------------------------------------------------------------------------------------


def elements(net: Net, batch: MicroBatch, terms: int = 1) -> list[Term]:
    """The loss of every supervised position, by the definition of cross entropy; a second term counts examples."""
    logits = net(batch.x.double())
    losses = [
        torch.logsumexp(logits[i, t], 0) - logits[i, t, batch.labels[i, t]]
        for i, t in (batch.labels != IGNORED).nonzero().tolist()
    ]
    squares = [AUXILIARY * (example.mean(0) ** 2).mean() for example in logits]
    return [Term(losses, len(losses)), Term(squares, len(squares))][:terms]


def deal(net: Net, run: Run) -> list[tuple[list[nn.Parameter], float]]:
    """The parameters of each group or optimizer, in the model's own order, with its learning rate."""
    parameters = list(net.parameters())
    if run.layout == "one":
        return [(parameters, run.lr)]
    return [(parameters[:3], run.lr), (parameters[3:], run.lr / 2)]


def twin_of(run: Run, scale: LossScale | None = None) -> tuple[Net, Reference]:
    net = copy.deepcopy(run.net).double()
    _, kind, options = run.optimizer
    schedule = None if run.decay is None else Schedule(lambda n: run.decay**n, run.unit)  # type: ignore[operator,arg-type]
    optimizers = [kind(parameters, lr=lr, **options) for parameters, lr in deal(net, run)]
    return net, Reference(optimizers, scale=scale, max_norm=run.max_norm, schedule=schedule)


def update_twin(net: Net, reference: Reference, group: list[MicroBatch], terms: int = 1) -> ReferenceUpdate:
    return reference.update([lambda b=batch: elements(net, b, terms) for batch in group])  # type: ignore[misc]


# --- the engine ---------------------------------------------------------------------------------------------------


class Engine:
    """A manager on a run, and the gradients its optimizer was handed at its last update."""

    def __init__(self, run: Run, precision: str, *, see: bool = False, fused: bool = False, **policy: Any) -> None:
        self.run = run
        self.net = copy.deepcopy(run.net)
        if precision == "fp64":
            self.net.double()
        make, _, options = run.optimizer
        options = options | ({"fused": True} if fused else {})
        dealt = deal(self.net, run)
        if run.layout == "groups":
            groups = [{"params": parameters, "lr": lr} for parameters, lr in dealt]
            self.optimizers = [make(groups, lr=run.lr, **options)]
        else:
            self.optimizers = [make(parameters, lr=lr, **options) for parameters, lr in dealt]
        self.schedulers = (
            []
            if run.decay is None
            else [torch.optim.lr_scheduler.LambdaLR(o, lambda n: run.decay**n) for o in self.optimizers]  # type: ignore[operator]
        )
        self.manager = MixedPrecisionManager(
            precision="fp32" if precision == "fp64" else precision,
            max_norm=run.max_norm,
            scheduler_unit=run.unit,
            **policy,
        )
        self.handed: list[Tensor | None] = []
        self.first = True
        if see:  # a hook also keeps the update off the folded path: gradients are unscaled and clipped in place
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(lambda *_: self._look())

    def _look(self) -> None:
        if self.first:
            self.handed = [None if p.grad is None else p.grad.detach().clone() for p in self.net.parameters()]
        self.first = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    @property
    def scheduler(self) -> Any:
        return self.schedulers[0] if self.schedulers else None

    def losses(self, batch: MicroBatch, reduction: str = "mean") -> list[Tensor]:
        """Each term, as a mean over what it counts or as a sum."""
        dtype = next(self.net.parameters()).dtype
        with self.manager.context():
            logits = self.net(batch.x.to(dtype))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        entropy = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction=reduction)
        squares = AUXILIARY * (logits.mean(1) ** 2).mean(1)
        return [entropy, squares.mean() if reduction == "mean" else squares.sum()][: self.run.terms]

    def loss(self, batch: MicroBatch) -> Tensor:
        return self.losses(batch)[0]

    def step(self) -> Update:
        self.first = True
        several = len(self.optimizers) > 1
        return self.manager.step(
            self.net,
            self.optimizers if several else self.optimizer,
            (self.schedulers if several else self.scheduler) or None,
        )

    def weights(self, batch: MicroBatch) -> list[int]:
        return [batch.live(), len(batch.x)][: self.run.terms]

    def updates(self) -> Iterator[Update]:
        """Train through all groups by the flow the run names."""
        run, manager = self.run, self.manager
        if run.flow in ("along", "plain"):
            for group in run.groups():
                totals = [sum(column) for column in zip(*map(self.weights, group), strict=True)]
                for batch in group:
                    if run.flow == "along":
                        manager.backward(self.losses(batch), weight=self.weights(batch))
                    else:
                        manager.backward(sum(s / w for s, w in zip(self.losses(batch, "sum"), totals, strict=True)))
                yield self.step()
            return
        weight = None if run.flow == "graph" else self.weights
        reduction = {"sum": "sum", "divided": "none"}.get(run.flow, "mean")
        for group in manager.groups(run.micro_batches, run.size, weight=weight, reduction=reduction):
            for batch in group:
                if run.flow == "divided":
                    sums = self.losses(batch, "sum")
                    manager.backward([s / w for s, w in zip(sums, group.weights, strict=True)])
                else:
                    manager.backward(self.losses(batch, reduction))
            yield self.step()


def detached(net: nn.Module) -> list[Tensor | None]:
    return [parameter.detach() for parameter in net.parameters()]


def off(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    """‖ours − theirs‖ over all parameters; a parameter has a gradient in both or in neither."""
    gaps = []
    for our, their in zip(ours, theirs, strict=True):
        assert (our is None) == (their is None) or float((our if their is None else their).abs().max()) == 0.0  # type: ignore[union-attr]
        if our is not None and their is not None:
            gaps.append(our.double() - their)
    return norm(gaps)
