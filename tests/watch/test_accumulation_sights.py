"""What is seen of accumulation: losses between reduction and root, reads, ways to a backward, batch statistics."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.events import (
    BatchStatistics,
    Contribution,
    Event,
    GradientsCleared,
    GradientsEdited,
    HalfSums,
    LossRead,
    ModuleCalled,
    OptimizerMade,
)
from halfstep.watch import Session


def watched(work: Callable[[], Any]) -> list[Event]:
    """The events of what is done in ``work``."""
    session, events = Session(), []
    see = session.judge.see

    def note(event: Event) -> None:
        events.append(event)
        see(event)

    session.judge.see = note  # type: ignore[method-assign]
    with session:
        work()
    assert not [f.message for f in session.findings if f.rule == "halfstep-internal"]
    return events


def run(script: str, path: Path) -> list[Event]:
    file = path / "script.py"
    file.write_text(script)
    code = compile(script, str(file), "exec")
    return watched(lambda: exec(code, {"__name__": "script"}))


def of(kind: type[Any], events: list[Event]) -> list[Any]:
    return [e for e in events if type(e) is kind]


def test_divisions_and_reads_are_seen_with_their_lines(tmp_path: Path) -> None:
    events = run(
        "import torch\n"
        "w = torch.nn.Parameter(torch.randn(3, 4))\n"
        "def reduce(x):\n"
        "    return torch.nn.functional.cross_entropy(x @ w, torch.tensor([0, 1]))\n"
        "loss = reduce(torch.randn(2, 3))\n"
        "first = loss.item()\n"
        "loss = loss / 4\n"
        "kept = loss.detach()\n"
        "root = loss * 0.5 * 128\n"
        "root.backward()\n"
        "total = torch.zeros(()) + kept\n"
        "last = root.item() * 8\n",
        tmp_path,
    )
    (contribution,) = of(Contribution, events)
    assert contribution.loss_at.line == 4
    assert [(d.by, d.at.line, d.multiplied) for d in contribution.divisions] == [(2.0, 9, True), (4.0, 7, False)]
    reads = {(r.at.line, r.how): (r.factor, r.multiplied) for r in of(LossRead, events)}
    assert reads == {(6, "item"): (16.0, False), (11, "add"): (64.0, False), (12, "item"): (1.0, True)}


def test_division_by_zero_is_a_division(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "w = torch.nn.Parameter(torch.ones(3))\n"
        "mask = torch.zeros(3)\n"
        "s = (w * mask).sum()\n"
        "n = mask.sum()\n"
        "(s / n).backward()\n"
    )
    (contribution,) = of(Contribution, run(script, tmp_path))
    assert [(d.by, d.at.line) for d in contribution.divisions] == [(0.0, 6)]


def test_an_address_used_again_is_no_read_of_a_loss(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "net = torch.nn.Linear(3, 1)\n"
        "for _ in range(6):\n"
        "    net(torch.randn(2, 3)).square().mean().backward()\n"
        "    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
        "    norm.item()\n"
        "    torch.tensor(2.0).item()\n"
        "    net.zero_grad()\n"
    )
    assert of(LossRead, run(script, tmp_path)) == []


def test_two_calls_of_one_helper_are_two_ways() -> None:
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def both() -> None:
        def contribute() -> None:
            net(torch.randn(3, 2)).square().mean().backward()

        for _ in range(2):
            contribute()
        contribute()
        opt.step()

    first, second, third = (c.route for c in of(Contribution, watched(both)))
    assert first == second != third


def test_what_was_reached_and_hooked() -> None:
    trunk, one, two = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)

    def heads() -> None:
        opt = torch.optim.SGD([*trunk.parameters(), *one.parameters(), *two.parameters()], lr=0.1)
        for head in (one, two, one):
            head(trunk(torch.randn(3, 2))).sum().backward()
        one.weight.register_hook(lambda grad: grad / 2)
        one(trunk(torch.randn(3, 2))).sum().backward()
        opt.step()

    contributions = of(Contribution, watched(heads))
    a, b, c, d = (c.reached[1] for c in contributions)
    assert a == c == d != b
    assert [c.hooked for c in contributions] == [False, False, False, True]


def test_a_state_handed_on_is_carried() -> None:
    cell = nn.GRUCell(2, 3)

    def unroll() -> None:
        state = torch.zeros(1, 3)
        for keep in (True, True, False):
            state = cell(torch.randn(1, 2), state if keep else state.clone())
            state = state.detach()

    assert [c.carried for c in of(ModuleCalled, watched(unroll))] == [False, True, False]


def test_an_optimizer_made_before_anybody_watched_is_known_from_the_first_backward() -> None:
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def work() -> None:
        net(torch.randn(3, 2)).sum().backward()
        opt.step()

    events = watched(work)
    (contribution,) = of(Contribution, events)
    ((ident, reached),) = contribution.optimizers.items()
    (made,) = [e for e in of(OptimizerMade, events) if e.optimizer == ident]  # other tests' may still live
    assert (made.at, made.type, made.parameters, reached) == (None, "SGD", 2, 2)


def test_clearing_by_hand_has_a_line(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "net = torch.nn.Linear(3, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "def clear():\n"
        "    for p in net.parameters():\n"
        "        p.grad = None\n"
        "for _ in range(2):\n"
        "    net(torch.randn(2, 3)).mean().backward()\n"
        "    opt.step()\n"
        "    clear()\n"
    )
    (cleared,) = of(GradientsCleared, run(script, tmp_path))
    assert (cleared.how, cleared.had, cleared.at.line) == ("by hand", 2, 6)


@pytest.mark.parametrize(("part", "zeroed"), [(slice(None), True), (slice(0, 1), False)])
def test_a_row_of_a_gradient_is_not_the_gradient(part: slice, zeroed: bool) -> None:
    table = nn.Embedding(4, 2)

    def edit() -> None:
        opt = torch.optim.SGD(table.parameters(), lr=0.1)
        table(torch.tensor([1, 2])).sum().backward()
        assert table.weight.grad is not None
        table.weight.grad.data[part].zero_()
        opt.step()

    (edited,) = of(GradientsEdited, watched(edit))
    assert edited.zeroed is zeroed


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2)])
def test_batch_statistics_are_held_against_the_group_as_one_batch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)
    inputs = [torch.randn(shape) + k for k in range(3)]
    above = [torch.randn(shape) for _ in inputs]

    def group() -> None:
        layer = nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)
        opt = torch.optim.SGD(layer.parameters(), lr=0.1)
        for x, g in zip(inputs, above, strict=True):
            (layer(x.clone().requires_grad_()) * g).sum().backward()
        opt.step()

    (seen,) = of(BatchStatistics, watched(group))

    def gradient(xs: list[torch.Tensor], gs: list[torch.Tensor]) -> torch.Tensor:
        x = torch.cat(xs).double().requires_grad_()
        (norm.double()(x) * torch.cat(gs)).sum().backward()
        assert x.grad is not None
        return x.grad

    parts = torch.cat([gradient([x], [g]) for x, g in zip(inputs, above, strict=True)])
    whole = gradient(inputs, above)
    assert seen.difference == pytest.approx(float((whole - parts).norm() / parts.norm()), rel=1e-4)
    assert (seen.layers, seen.samples, len(seen.contributions)) == (1, 4, 3)


def test_frozen_statistics_are_not_measured() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net[1].eval()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def group() -> None:
        for _ in range(3):
            net(torch.randn(4, 2)).mean().backward()
        opt.step()

    assert of(BatchStatistics, watched(group)) == []


def test_sums_in_half_precision_beside_the_optimizer() -> None:
    net = nn.Linear(2, 2).to(torch.bfloat16)
    master = [p.detach().float() for p in net.parameters()]
    opt = torch.optim.SGD(master, lr=0.1)

    def groups() -> None:
        for size in (9, 3, 12):
            for _ in range(size):
                net(torch.randn(2, 2, dtype=torch.bfloat16)).float().mean().backward()
            for m, p in zip(master, net.parameters(), strict=True):
                assert p.grad is not None
                m.grad, p.grad = p.grad.float(), None
            opt.step()

    assert [(s.dtype, s.parameters, s.contributions) for s in of(HalfSums, watched(groups))] == [
        ("bfloat16", 2, 9),
        ("bfloat16", 2, 12),
    ]


def test_a_group_is_let_go_and_computed_as_ever() -> None:
    def train() -> tuple[list[torch.Tensor], list[weakref.ref[torch.Tensor]]]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2))
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
        refs = []
        for i in range(12):
            x, y = torch.randn(5, 4), torch.randint(0, 2, (5,))
            out = net(x)
            loss = nn.functional.cross_entropy(out, y)
            (loss / 3).backward()
            refs += [weakref.ref(loss), weakref.ref(out)]
            if i % 3 == 2:
                opt.step()
                opt.zero_grad()
        return [p.detach().clone() for p in (*net.parameters(), *net.buffers())], refs

    plain, _ = train()
    kept: list[Any] = []
    watched(lambda: kept.extend(train()))
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip(plain, kept[0], strict=True))
    assert not [ref for ref in kept[1] if ref() is not None]
