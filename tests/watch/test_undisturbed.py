"""What else runs in the process is not disturbed: threads, workers, transforms, TorchScript, copies, fake tensors."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import halfstep
from halfstep.events import Contribution, Event
from halfstep.watch import Session


def quiet(session: Session) -> list[str]:
    """What went wrong inside halfstep, and what it says aloud."""
    return [f.message for f in session.findings if f.rule == "halfstep-internal" or f.severity != "info"]


def train(seed: int, updates: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(updates):
        x = torch.randn(6, 4, generator=generator)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_threads_that_train_at_once() -> None:
    plain = [train(seed, 12) for seed in range(4)]
    results: dict[int, list[torch.Tensor]] = {}
    with halfstep.watch() as session:
        threads = [threading.Thread(target=lambda s=s: results.update({s: train(s, 12)})) for s in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert all(same(plain[s], results[s]) for s in range(4))
    assert session.summary.applied == 48
    assert session.summary.micro_batches == 48
    assert [f.message for f in session.findings if f.rule == "halfstep-internal"] == []


def test_a_thread_that_trains_alone_leaves_the_look_whole() -> None:
    plain = train(3)
    results: list[list[torch.Tensor]] = []
    seen: list[Event] = []
    session = Session()
    release = session.stream._release
    session.stream._release = lambda event: (seen.append(event), release(event))[1]
    with session:
        thread = threading.Thread(target=lambda: results.append(train(3)))
        thread.start()
        thread.join()
        assert same(train(3), plain)
    assert _get_current_dispatch_mode() is None
    assert same(results[0], plain)
    assert quiet(session) == []
    halves = [e.halves for e in seen if isinstance(e, Contribution)]
    assert all(h is None for h in halves[:5]), "operators of another thread are not seen, which is not: there were none"


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        active = Session._active is not None or _get_current_dispatch_mode() is not None
        watched = hasattr(torch.autograd.backward, "__wrapped__")
        out = nn.Linear(3, 3)(torch.full((3,), float(index)))  # a module call in a worker
        return torch.tensor([float(active), float(watched), float(out.requires_grad)])


def test_workers_of_a_loader_are_not_watched() -> None:
    seen: list[Event] = []
    session = Session()
    release = session.stream._release
    session.stream._release = lambda event: (seen.append(event), release(event))[1]
    with session:
        rows = torch.cat(list(DataLoader(Squares(), batch_size=6, num_workers=2, multiprocessing_context="fork")))
        train(0)
    assert rows.shape == (24, 3)
    assert rows[:, 0].sum() == 0, "a session was active in a worker"
    assert session.summary.applied == 5
    assert quiet(session) == []


def test_function_transforms() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    x = torch.randn(7, 3)
    parameters = {k: v.detach() for k, v in net.named_parameters()}

    def loss(p: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, p, (row,)).square().sum()

    def penalty(row: torch.Tensor) -> torch.Tensor:
        row = row.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(parameters, row), row, create_graph=True)
        return slope.square().sum()

    def all_of_it() -> list[torch.Tensor]:
        per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        hessian = torch.func.hessian(lambda row: loss(parameters, row))(x[0])
        _, product = torch.func.jvp(lambda row: loss(parameters, row), (x[0],), (torch.ones(3),))
        return [*per_example.values(), hessian, product, penalty(x)]

    plain = all_of_it()
    with halfstep.watch() as session:
        watched = all_of_it()
    assert same(plain, watched)
    assert quiet(session) == []


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.inner(x)
        return self.inner(-x)


def test_torchscript() -> None:
    torch.manual_seed(0)
    net, x = Scripted(), torch.randn(2, 3)
    with halfstep.watch() as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net)
        traced = torch.jit.trace(net.inner, x)
        opt = torch.optim.SGD(scripted.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            scripted(x).sum().backward()
            opt.step()
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(x), scripted(x))
    assert torch.equal(traced(x), net.inner(x))
    assert "halfstep" not in traced.code + scripted.code
    assert quiet(session) == []


def test_copies_and_pickles() -> None:
    with halfstep.watch() as session:
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))
        opt = torch.optim.Adam(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        region = torch.autocast("cpu", dtype=torch.float16)
        with region:
            loss = net(torch.randn(5, 3)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        twin = copy.deepcopy((net, opt, scaler, region))
        data = pickle.dumps((net, opt, scaler))
    back, optimizer, scale = pickle.loads(data)
    assert same(list(back.parameters()), list(net.parameters()))
    assert same(list(twin[0].parameters()), list(net.parameters()))
    assert optimizer.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
    assert scale.get_scale() == scaler.get_scale() == twin[2].get_scale()
    for thing in (*net.modules(), opt, scaler, region):
        assert not [name for name in vars(thing) if "halfstep" in name]
    assert quiet(session) == []


def test_inference_mode() -> None:
    with halfstep.watch() as session:
        with torch.inference_mode():
            net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            averages = [torch.zeros(3), torch.zeros(4)]
            torch._foreach_add_(averages, 1.0)
            torch._foreach_mul_(averages, 0.5)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(torch.randn(5, 3))
        assert out.is_inference()
        assert float(averages[0][0]) == 0.5
        train(1)
    assert quiet(session) == []


def test_fake_tensors() -> None:
    """A dry run for memory, say: nothing in it has a value that could be read."""
    with halfstep.watch() as session:
        with FakeTensorMode():
            net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
            for _ in range(3):
                opt.zero_grad()
                checkpoint(net, torch.randn(6, 4), use_reentrant=False).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
            session.stream.flush()
        assert _get_current_dispatch_mode() is None or session.look.is_open
        with torch.device("meta"):
            empty = nn.Linear(3, 3)
            empty(torch.randn(2, 3)).sum().backward()
        plain = train(2)
    assert same(plain, train(2))
    assert quiet(session) == []


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_scripts_own() -> None:
    """It is entered and left around updates, over a look or under none: it is taken off, not ours in its place."""
    with halfstep.watch() as session:
        train(1, 1)
        with Counting() as mode:
            train(1, 3)
        within = mode.count
        train(1, 2)
        assert mode.count == within, "it went on counting after it was left"
        session.look.close()
        with Counting() as second:
            train(1, 2)
        assert second.count
        assert session.look.is_open is False or _get_current_dispatch_mode() is session.look._mode
        train(1, 2)
    assert _get_current_dispatch_mode() is None
    assert quiet(session) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_saves_and_computes_what_it_would(reentrant: bool) -> None:
    """Batch statistics move, random numbers are drawn and tensors are saved exactly as often as unwatched."""

    def run() -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(5)
        block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.GELU())
        head, saved = nn.Linear(6, 2), 0
        opt = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.1)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += 1
            return tensor

        for _ in range(4):
            x = torch.randn(8, 6, requires_grad=True)
            opt.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = head(checkpoint(block, x, use_reentrant=reentrant))
                    loss = nn.functional.cross_entropy(out, (x[:, 0] > 0).long())
                loss.backward()
            opt.step()
        state = [*block.state_dict().values(), *head.state_dict().values(), torch.get_rng_state()]
        return state, saved

    plain, saved = run()
    with halfstep.watch() as session:
        watched, again = run()
    assert same(plain, watched)
    assert saved == again
    assert quiet(session) == []


def hooked() -> tuple[nn.Linear, list[torch.Tensor]]:
    """A layer whose first rows a hook freezes and whose bias another one clears, trained with decay."""
    torch.manual_seed(3)
    net = nn.Linear(6, 4)
    net.weight.register_hook(lambda g: torch.cat([torch.zeros_like(g[:2]), g[2:]]))
    bias = net.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(12):
        opt.zero_grad()
        net(torch.randn(5, 6)).square().mean().backward()
        opt.step()
        if number == 8:
            bias.remove()
    return net, [p.detach().clone() for p in net.parameters()]


def test_hooks_of_the_script_get_and_leave_what_they_did() -> None:
    _, plain = hooked()
    with halfstep.watch() as session:
        net, watched = hooked()
    assert same(plain, watched)
    assert len(net.weight._backward_hooks or {}) == 1
    assert not net.bias._backward_hooks
    assert {f.rule for f in session.findings if f.severity != "info"} == {"frozen-parameters-move"}
