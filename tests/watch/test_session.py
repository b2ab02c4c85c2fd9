"""A session changes nothing: not torch, not the run's results, not its host reads; and it cannot fail the run."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.events import Event
from halfstep.watch import Session


def train(updates: int = 6, half: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Any]:
    """An ordinary loop with dropout, accumulation, clipping, a schedule and a scaler; returns all that it computed."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.LinearLR(opt, total_iters=updates)
    scaler = torch.amp.GradScaler("cpu", enabled=half == torch.float16, init_scale=2.0**8)
    losses = []
    for _ in range(updates):
        for _ in range(2):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", dtype=half):
                loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)) / 2
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        opt.zero_grad()
    return {
        "parameters": [p.detach().clone() for p in net.parameters()],
        "losses": torch.stack(losses),
        "random": torch.get_rng_state(),
        "optimizer": opt.state_dict(),
        "scaler": scaler.state_dict(),
        "schedule": sched.state_dict(),
    }


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield key
            yield from flat(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    else:
        yield value


def identical(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(flat(a), flat(b), strict=True)
    )


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_watched_run_is_bit_identical(half: torch.dtype) -> None:
    plain = train(half=half)
    with halfstep.watch() as session:
        watched = train(half=half)
    assert identical(plain, watched)
    assert session.findings == ()
    assert session.summary.applied == 6
    assert session.summary.micro_batches == 12


def hooked() -> dict[str, Any]:
    owners = [
        torch.autograd,
        torch.amp.GradScaler,
        torch.optim.Optimizer,
        nn.Module,
        torch.nn.utils,
        torch.nn.utils.clip_grad,
        torch.amp.autocast_mode.autocast,
        torch,
        *[k for k in vars(torch.optim.lr_scheduler).values() if isinstance(k, type)],
    ]
    return {f"{owner}.{name}": value for owner in owners for name, value in vars(owner).items() if callable(value)}


def test_torch_is_exactly_as_it_was() -> None:
    train(1)  # torch wraps an optimizer's `step` when the first of its class is made
    before = hooked()
    with halfstep.watch():
        inside = hooked()
        train(1)
    after = hooked()
    assert {k for k in before if before[k] is not inside[k]}
    assert [k for k in before if before[k] is not after.get(k)] == []
    assert set(before) == set(after)


def test_nested_and_repeated_sessions() -> None:
    with halfstep.watch() as outer:
        with halfstep.watch() as inner:
            train(2)
        assert torch.autograd.backward.__wrapped__ is not None  # still watched
        train(1)
    assert outer.summary.applied == 3
    assert inner.findings == outer.findings
    session = Session().start()
    train(1)
    session.stop()
    train(1)  # unseen
    session.start()
    train(1)
    session.finish()
    assert session.summary.applied == 2


def test_a_failure_of_ours_is_a_finding_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.watch import backwards

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    plain = train(2)
    monkeypatch.setattr(backwards, "weigh", broken)
    with halfstep.watch() as session:
        watched = train(2)
    assert identical(plain, watched)
    internal = [f for f in session.findings if f.rule == "halfstep-internal"]
    assert internal
    assert "ours" in internal[0].message
    assert not [f for f in session.findings if f.severity != "info"]


class Reads(TorchDispatchMode):
    """Counts values that travel to the host, outside looks."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_watching_adds_no_host_read() -> None:
    def reads() -> Counter[str]:
        with Reads() as mode:
            train(4)
        return mode.count

    plain = reads()
    session = Session()
    with session:
        session.look.forbid("counted without looks")
        watched = reads()
    assert watched == plain


def test_no_graph_is_held() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    with halfstep.watch():
        net = nn.Linear(4, 4)
        torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            hidden = net(torch.randn(3, 4))
            held.append(weakref.ref(hidden))
            loss = hidden.pow(2).mean()
            loss.backward()
            del hidden, loss
        gc.collect()
        assert [ref() for ref in held] == [None] * 5


def test_events_are_released_in_order_with_the_users_lines() -> None:
    seen: list[Event] = []
    session = Session()
    release = session.stream._release

    def note(event: Event) -> None:
        seen.append(event)
        release(event)

    session.stream._release = note
    with session:
        train(2)
    assert [e.seq for e in seen] == sorted(e.seq for e in seen)
    lines = {e.at.file for e in seen if e.at is not None}
    assert lines == {__file__}


def test_the_front_door_shows_its_own_names_and_how_to_call_them() -> None:
    public = [name for name in dir(halfstep) if not name.startswith("__")]
    assert sorted(public) == sorted(halfstep.__all__)
    assert list(inspect.signature(halfstep.watch).parameters) == ["record", "tell"]
