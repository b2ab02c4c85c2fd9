"""What the watch sees of weights: averages however they are written, writes by hand, half precision that stands still;
and of orders. Every expectation is computed from the tensors themselves, beside the watch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.events import (
    AverageUpdated,
    Event,
    MomentSampled,
    OrderPassed,
    ParametersChanged,
    ParametersSampled,
)
from halfstep.record.reader import events, files

Kind = TypeVar("Kind", bound=Event)
DECAY = 0.9


def seen(folder: Path, kind: type[Kind], run: Callable[[], None]) -> list[Kind]:
    with halfstep.watch(record=folder) as session:
        run()
    assert not [f for f in session.findings if f.rule == "halfstep-internal"]
    return [e for file in files(folder) for e in events(file) if isinstance(e, kind)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def update(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


# -- averages ----------------------------------------------------------------------------------------------------

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def in_place(pairs: Pairs) -> None:
    for old, new in pairs:
        old.mul_(DECAY).add_(new, alpha=1 - DECAY)


def scaled_first(pairs: Pairs) -> None:
    for old, new in pairs:
        old.mul_(DECAY)
        old += (1 - DECAY) * new


def interpolated(pairs: Pairs) -> None:
    for old, new in pairs:
        old.lerp_(new, 1 - DECAY)


def copied_over(pairs: Pairs) -> None:
    for old, new in pairs:
        old.copy_(old * DECAY + (1 - DECAY) * new.detach())


def by_difference(pairs: Pairs) -> None:
    for old, new in pairs:
        old.sub_((1 - DECAY) * (old - new))


def towards(pairs: Pairs) -> None:
    for old, new in pairs:
        old.add_(new - old, alpha=1 - DECAY)


def in_lists(pairs: Pairs) -> None:
    olds, news = [old for old, _ in pairs], [new.detach() for _, new in pairs]
    torch._foreach_mul_(olds, DECAY)
    torch._foreach_add_(olds, news, alpha=1 - DECAY)


def in_one_list(pairs: Pairs) -> None:
    torch._foreach_lerp_([old for old, _ in pairs], [new.detach() for _, new in pairs], 1 - DECAY)


@pytest.mark.parametrize(
    "form", [in_place, scaled_first, interpolated, copied_over, by_difference, towards, in_lists, in_one_list]
)
def test_an_average_is_known_by_its_arithmetic(form: Callable[[Pairs], None], tmp_path: Path) -> None:
    net = model()
    average = copy.deepcopy(net).requires_grad_(False)

    def run() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            update(net, optimizer)
            with torch.no_grad():
                form(list(zip(average.parameters(), net.parameters(), strict=True)))

    found = seen(tmp_path, AverageUpdated, run)
    assert len(found) == 3
    assert {e.average for e in found} == {found[0].average}
    assert all(sum(e.optimizers.values()) == 4 for e in found)
    assert all(e.decay == pytest.approx(DECAY) for e in found)


def test_arithmetic_of_a_graph_or_of_an_optimizer_is_no_average(tmp_path: Path) -> None:
    net = model()
    base = [p.detach().clone() for p in net.parameters()]

    def run() -> None:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            mixed = [0.9 * p + 0.1 * b for p, b in zip(net.parameters(), base, strict=True)]
            sum(m.square().sum() for m in mixed).backward()  # type: ignore[union-attr]
            optimizer.step()
            with torch.no_grad():
                [0.5 * p + 0.4 * b for p, b in zip(net.parameters(), base, strict=True)]  # the shares are not one

    assert seen(tmp_path, AverageUpdated, run) == []


def test_an_average_in_half_precision_that_stands_still(tmp_path: Path) -> None:
    net = model()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.module.bfloat16()
    shares: list[float] = []

    def run() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for turn in range(4):
            update(net, optimizer)
            half = copy.deepcopy(net).bfloat16()
            before = [p.detach().clone() for p in average.module.parameters()]
            average.update_parameters(half)
            triples = list(zip(before, average.module.parameters(), half.parameters(), strict=True))
            far = [(p.float() - b.float()).abs() > b.float().abs() / 16 for b, _, p in triples]
            still = sum(int((f & (a == b)).sum()) for f, (b, a, _) in zip(far, triples, strict=True))
            if turn:
                shares.append(still / sum(int(f.sum()) for f in far))

    torch.manual_seed(1)
    found = [e for e in seen(tmp_path, AverageUpdated, run) if e.still is not None]
    assert [e.still for e in found] == pytest.approx(shares)


# -- parameters --------------------------------------------------------------------------------------------------


def test_a_write_to_parameters_is_told_with_its_line(tmp_path: Path) -> None:
    net = model()

    def run() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        update(net, optimizer)
        for p in net.parameters():
            p.data.mul_(0.99)

    found = seen(tmp_path, ParametersChanged, run)
    assert [(e.operator, e.optimizers) for e in found] == [("mul_", {1: 4})]
    assert found[0].at is not None
    assert found[0].at.file == __file__


def test_half_parameters_are_counted_as_they_are(tmp_path: Path) -> None:
    net = model().bfloat16()
    first = [p.detach().clone() for p in net.parameters()]
    counts: dict[int, tuple[int, int]] = {}

    def run() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        driven = [torch.ones_like(p, dtype=torch.bool) for p in net.parameters()]
        for turn in range(1, 11):
            optimizer.zero_grad()
            net(torch.randn(8, 4).bfloat16()).float().square().mean().backward()
            if turn & (turn - 1) == 0:
                driven = [d & (p.grad != 0) for d, p in zip(driven, net.parameters(), strict=True)]
            optimizer.step()
            still = [d & (p == f) for d, p, f in zip(driven, net.parameters(), first, strict=True)]
            counts[turn] = (sum(int(d.sum()) for d in driven), sum(int(s.sum()) for s in still))

    found = seen(tmp_path, ParametersSampled, run)
    assert [e.updates for e in found] == [1, 8, 10]
    assert [(e.driven, e.still) for e in found] == [counts[1], counts[8], counts[10]]


def test_a_second_moment_is_held_against_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 8).bfloat16())
    ratio: list[float] = []

    def run() -> None:
        optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, 0.99))
        wide = torch.zeros(16, 8)
        for turn in range(64):
            weight.grad = (torch.randn(16, 8) * (10 if turn < 8 else 0.1)).bfloat16()
            optimizer.step()
            wide = 0.99 * wide + 0.01 * weight.grad.float().square()
            if turn == 0:
                wide = optimizer.state[weight]["exp_avg_sq"].float()
        ratio.append((optimizer.state[weight]["exp_avg_sq"].float() / wide).median().item())

    found = seen(tmp_path, MomentSampled, run)
    assert found[-1].updates == 64
    assert found[-1].ratio == pytest.approx(ratio[0], rel=1e-4)


# -- orders ------------------------------------------------------------------------------------------------------


def test_passes_are_compared_without_drawing_a_number(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(24.0)[:, None])
    orders: list[list[float]] = []

    def epochs() -> torch.Tensor:
        torch.manual_seed(3)
        net = nn.Linear(1, 1)
        chance = torch.Generator()
        for seed in (5, 5, 6):
            chance.manual_seed(seed)
            orders.append([])
            for (x,) in DataLoader(data, batch_size=6, shuffle=True, generator=chance):
                orders[-1] += x.flatten().tolist()
                net(x).mean().backward()
        return torch.cat([torch.rand(1), torch.rand(1, generator=chance), net.weight.detach().flatten()])

    plain, results = epochs(), []
    found = seen(tmp_path, OrderPassed, lambda: results.append(epochs()))
    assert torch.equal(plain, results[0])
    assert orders[:3] == orders[3:]
    repeats = [e.repeats for e in found]
    assert [e.batches for e in found] == [4, 4, 4]
    assert repeats[0] == 0
    assert repeats[1] == 4
    assert orders[1] != orders[2]
    assert repeats[2] < 4


# -- nothing changes ---------------------------------------------------------------------------------------------


def test_what_is_watched_computes_the_same() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(7)
        net, half = model(), model().bfloat16()
        slow = [p.detach().clone() for p in half.parameters()]
        net[0].weight.register_hook(lambda grad: grad * 0.5)
        optimizer = torch.optim.AdamW([*net.parameters(), *half.parameters()], lr=1e-2)
        loader = DataLoader(torch.randn(24, 4), batch_size=6, shuffle=True)
        for epoch in range(3):
            net[2].requires_grad_(epoch != 1)
            for x in loader:
                optimizer.zero_grad(set_to_none=False)
                (net(x).square().mean() + half(x.bfloat16()).float().square().mean()).backward()
                half[0].bias.grad.zero_()
                optimizer.step()
                with torch.no_grad():
                    in_place(list(zip(slow, half.parameters(), strict=True)))
            net.eval()
            with torch.no_grad():
                net(x)
            net.train()
        return [*net.state_dict().values(), *half.state_dict().values(), *slow, torch.get_rng_state()]

    plain = run()
    with halfstep.watch():
        watched = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
