"""What an update costs, as counts: words moved a parameter, and values read to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep import MixedPrecisionManager


class Words(TorchDispatchMode):
    """Counts elements moved: inputs read, outputs and mutated arguments written; and host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = 0
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        self.reads += "_local_scalar_dense" in schema.name
        given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        if all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns) and schema.returns:
            return out  # a view moves nothing
        for argument in schema.arguments:
            words = count(given.get(argument.name))
            written = argument.alias_info is not None and argument.alias_info.is_write
            self.words += words * (1 + written)
        if not any(r.alias_info is not None for r in schema.returns):
            self.words += count(out)
        return out


def count(value: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))


def updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: MixedPrecisionManager,
    scheduler: Any = None,
    number: int = 3,
    **weight: Any,
) -> tuple[float, int]:
    """(words a parameter, host reads) of ``manager.step`` in the last of some updates."""
    for _ in range(number):
        for _ in range(2):
            with manager.context():
                loss = model(torch.randn(2, 128)).float().square().mean()
            manager.backward(loss, **weight)
        with Words() as words:
            update = manager.step(model, optimizer, scheduler)
        assert update.applied
        assert update.clip_coefficient < 1.0
        assert len(update.layer_norms) == 6
    return words.words / sum(p.numel() for p in model.parameters()), words.reads


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("weight", [{}, {"weight": 3}])
@pytest.mark.parametrize("scheduled", [False, True])
def test_fused_adamw_with_clipping_scaling_and_monitoring(
    precision: str, weight: dict[str, Any], scheduled: bool, late: bool
) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)) if scheduled else None
    manager = MixedPrecisionManager(precision=precision, max_norm=1e-4, init_scale=256.0)
    words, reads = updates(model, optimizer, manager, scheduler, **weight)
    assert words <= 9.05
    assert reads == 0


def test_fused_sgd_with_momentum(late: bool) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    words, reads = updates(model, optimizer, MixedPrecisionManager(precision="fp16", max_norm=1e-4, init_scale=256.0))
    assert words <= 7.05
    assert reads == 0


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_other_optimizers_cost_their_own_and_one_pass(kind: str, precision: str, late: bool) -> None:
    twin = make()
    own = OTHERS[kind](twin.parameters())
    for _ in range(3):
        twin(torch.randn(2, 128)).square().mean().backward()
        with Words() as alone:
            own.step()
        own.zero_grad()
    model = make()
    manager = MixedPrecisionManager(precision=precision, max_norm=1e-4, init_scale=256.0)
    words, reads = updates(model, OTHERS[kind](model.parameters()), manager)
    assert words <= alone.words / sum(p.numel() for p in twin.parameters()) + 3.05  # 5 is allowed
    assert reads - alone.reads <= 1


def test_a_skip_costs_one_pass(late: bool) -> None:
    model = make()
    optimizer = torch.optim.RMSprop(model.parameters())
    manager = MixedPrecisionManager(precision="fp16", init_scale=256.0)
    manager.backward(model(torch.randn(2, 128)).square().mean() * 1e38)
    with Words() as words:
        assert manager.step(model, optimizer).skipped
    assert words.words / sum(p.numel() for p in model.parameters()) < 1.05


def test_nothing_is_measured_where_nothing_is_asked() -> None:
    """No clipping, no monitoring, non-finite values ignored: the optimizer's own words, and nothing else."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    manager = MixedPrecisionManager(precision="bf16", max_norm=None, monitor=False, on_nonfinite="ignore")
    for _ in range(3):
        manager.backward(model(torch.randn(2, 128)).square().mean())
        with Words() as words:
            update = manager.step(model, optimizer)
    assert words.words / sum(p.numel() for p in model.parameters()) <= 8.05
    assert update.layer_norms == {}


def test_a_loss_scale_is_fed_even_then() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    policy = {"max_norm": None, "monitor": False, "on_nonfinite": "ignore", "growth_interval": 2, "init_scale": 8.0}
    manager = MixedPrecisionManager(precision="fp16", **policy)  # type: ignore[arg-type]
    for _ in range(4):
        manager.backward(model(torch.randn(2, 128)).square().mean())
        assert manager.step(model, optimizer).applied
    assert manager.loss_scale == 32.0


def test_backward_adds_no_operator_of_its_own() -> None:
    """Scale and weight enter as the gradient at the root: the graph is the user's, and no pass is added to it."""

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = MixedPrecisionManager(precision="fp32")

    def names(managed: bool) -> list[str]:
        losses = [model(torch.ones(1, 128)).square().mean() for _ in range(2)]
        with Names() as seen:
            for loss in losses:
                if managed:
                    manager.backward(loss, weight=7)
                else:
                    loss.backward()
        if managed:
            manager.step(model, optimizer)
        else:
            optimizer.zero_grad()
        return [name for name in seen.names if name not in ("aten::ones_like", "aten::detach")]

    for _ in range(3):
        managed = names(True)
    assert managed == names(False)
