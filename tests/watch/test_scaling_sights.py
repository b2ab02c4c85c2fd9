"""What is seen of loss scaling changes nothing of it: same numbers, same counters, nothing kept alive."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from halfstep.watch import Session

Optimizer = torch.optim.Optimizer


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def fused(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def train(make: Callable[[list[nn.Parameter]], Optimizer], updates: int = 4) -> tuple[list[torch.Tensor], list[int]]:
    """Scaled FP16, gradients measured and edited by hand, one overflow; the weights, and gradients' versions."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))
    parameters = list(net.parameters())
    optimizer = make(parameters)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    versions = []
    for _ in range(updates):
        x = torch.randn(5, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
            loss = nn.functional.mse_loss(out, 30 * x[:, :2].detach())
        (slope,) = torch.autograd.grad(scaler.scale(out.float().sum()), x, create_graph=True)
        loss = loss + (slope / scaler.get_scale()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, 0.5)
        total = torch.stack([g.norm() for g in grads]).norm()
        if torch.isfinite(total):
            grads[0].mul_(0.9)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        versions += [g._version for g in grads]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    return [p.detach().clone() for p in parameters], versions


@pytest.mark.parametrize("make", [adam, fused])
def test_a_look_leaves_every_number_and_counter_as_it_would_be(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    plain, versions = train(make)
    drawn = torch.get_rng_state()
    with Session() as session:
        watched, seen = train(make)
    assert torch.equal(drawn, torch.get_rng_state())
    assert seen == versions
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not [f for f in session.findings if f.rule == "halfstep-internal"]


def test_nothing_of_a_micro_batch_is_kept_alive() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    kept = []
    with Session():
        for _ in range(3):
            x = torch.randn(3, 4)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(x).square().mean()
            scaled = scaler.scale(loss)
            scaled.backward()
            norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
            print(norm.item())
            kept += [weakref.ref(t) for t in (x, loss, scaled, norm, *(p.grad for p in net.parameters()))]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            del x, loss, scaled, norm
            gc.collect()
            assert not [ref() for ref in kept if ref() is not None]


def test_torch_is_as_it_was() -> None:
    scaler = torch.amp.GradScaler
    before = {name: vars(scaler)[name] for name in ("scale", "unscale_", "step", "update", "get_scale", "__init__")}
    shown = torch._tensor_str._str
    with Session(), contextlib.suppress(RuntimeError):
        raise RuntimeError
    assert {name: vars(scaler)[name] for name in before} == before
    assert torch._tensor_str._str is shown
