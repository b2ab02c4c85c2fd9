"""Law 9: not activated, the manager is the plain FP32 loop; and the shape retrieval trainers are written in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import MixedPrecisionManager


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 9))


def batches(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 20, generator=g), torch.randint(0, 9, (4,), generator=g)) for _ in range(count)]


PLAIN = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("max_norm", [2.0, 0.05])
@pytest.mark.parametrize("how", ["flat", "groups"])
def test_not_activated_is_the_plain_loop_bit_for_bit(kind: str, size: int, max_norm: float, how: str) -> None:
    model, twin = make_model(), make_model()
    optimizer, by_hand = PLAIN[kind](model.parameters()), PLAIN[kind](twin.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedule_by_hand = torch.optim.lr_scheduler.CosineAnnealingLR(by_hand, 10)
    data = batches()

    torch.manual_seed(5)
    losses: list[float] = []
    for start in range(0, len(data), size):
        total = 0.0
        for x, y in data[start : start + size]:
            loss = F.cross_entropy(twin(x), y) / size
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        by_hand.step()
        schedule_by_hand.step()
        by_hand.zero_grad()
        losses.append(total)

    torch.manual_seed(5)
    manager = MixedPrecisionManager(False, max_norm=max_norm)
    got: list[float] = []
    if how == "groups":
        for group in manager.groups(data, size):
            for x, y in group:
                with manager.context():
                    loss = F.cross_entropy(model(x), y)
                manager.backward(loss)
            got.append(manager.step(model, optimizer, schedule).loss)
    else:
        for number, (x, y) in enumerate(data, 1):
            with manager.context():
                loss = F.cross_entropy(model(x), y) / size
            manager.backward(loss)
            if number % size == 0:
                got.append(manager.step(model, optimizer, schedule).loss)
    assert got == pytest.approx(losses, rel=1e-6)
    assert schedule.last_epoch == schedule_by_hand.last_epoch
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    for p, q in zip(optimizer.state.values(), by_hand.state.values(), strict=True):
        assert all(torch.equal(p[k], q[k]) for k in p if isinstance(p[k], Tensor))


class PlainManager:
    """What late-interaction retrieval trainers carry: torch's verbs in a row, a schedule that moves on skips too."""

    def __init__(self, activated: bool, dtype: torch.dtype) -> None:
        self.activated = activated
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler("cpu", enabled=activated and dtype == torch.float16)

    def context(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=self.dtype, enabled=self.activated)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object = None) -> None:
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0, error_if_nonfinite=False)
        self.scaler.step(optimizer)
        self.scaler.update()
        if scheduler is not None:
            scheduler.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()


def retrieve(manager: PlainManager | MixedPrecisionManager, updates: int, scale: float) -> tuple[nn.Module, object]:
    """The trainer's own loop: it knows four lines of the manager, and nothing of who made it."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 20))
    g = torch.Generator().manual_seed(2)
    accumulation = 2
    for number in range(updates * accumulation):
        queries, documents = torch.randint(0, 50, (4, 5), generator=g), torch.randint(0, 50, (4, 7), generator=g)
        with manager.context():
            q, d = F.normalize(encoder(queries), dim=-1), F.normalize(encoder(documents), dim=-1)
            scores = torch.einsum("aqh,bdh->abqd", q, d).amax(-1).sum(-1)
            loss = F.cross_entropy(scores.float() * scale, torch.arange(4)) / accumulation
        manager.backward(loss)
        if (number + 1) % accumulation == 0:
            manager.step(encoder, optimizer, scheduler)
    return encoder, scheduler


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_plain_shape_gives_the_plain_managers_bits(precision: str) -> None:
    """While nothing is skipped, at the same precision, the parameters are those of the hand-written manager."""
    dtype = {"fp32": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    plain = PlainManager(precision != "fp32", dtype)
    if precision == "fp16":
        plain.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    mine = MixedPrecisionManager(precision != "fp32", precision=precision, init_scale=2.0**10)
    expected, schedule = retrieve(plain, 6, 20.0)
    got, mine_schedule = retrieve(mine, 6, 20.0)
    assert mine.report()["counters"]["skipped"] == 0
    for p, q in zip(got.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
    assert mine_schedule.last_epoch == schedule.last_epoch == 6  # type: ignore[attr-defined]
    assert mine.activated is (precision != "fp32")
    assert isinstance(mine.scaler, torch.amp.GradScaler)
    assert mine.scaler.get_scale() == plain.scaler.get_scale()


def test_the_plain_shape_does_not_advance_its_schedule_on_skips() -> None:
    mine = MixedPrecisionManager(precision="fp16", init_scale=2.0**60)
    _, schedule = retrieve(mine, 6, 20.0)
    assert mine.report()["counters"]["skipped"] == 6
    assert schedule.last_epoch == 0  # type: ignore[attr-defined]


def test_fused_and_clipping_not_activated_agrees_to_rounding() -> None:
    model, twin = make_model().eval(), make_model().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    by_hand = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    manager = MixedPrecisionManager(False, max_norm=0.05)
    for x, y in batches(5):
        manager.backward(F.cross_entropy(model(x), y))
        manager.step(model, optimizer)
        F.cross_entropy(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        by_hand.step()
        by_hand.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_the_witness_leaves_no_trace_on_copies_of_the_model(tmp_path: object) -> None:
    """Averages of weights deep-copy models, checkpoints pickle them: nothing of the manager goes along."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = MixedPrecisionManager(False)
    x, y = batches(1)[0]
    manager.backward(F.cross_entropy(model(x), y))
    manager.step(model, optimizer)
    twin = copy.deepcopy(model)
    torch.save(model, f"{tmp_path}/model.pt")
    loaded = torch.load(f"{tmp_path}/model.pt", weights_only=False)
    for other in (twin, loaded):
        F.cross_entropy(other(x), y).backward()
        assert all(p._post_accumulate_grad_hooks is None for p in other.parameters())
    copy.deepcopy(optimizer).step()
    manager.backward(F.cross_entropy(model(x), y))
    assert manager.step(model, optimizer).applied


def test_compiled_models_train_like_eager_ones() -> None:
    model, twin = make_model().eval(), make_model().eval()
    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for module, plain in ((compiled, model), (twin, twin)):
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        manager = MixedPrecisionManager(precision="bf16")
        for group in manager.groups(batches(8), 2, weight=lambda b: len(b[0])):
            for x, y in group:
                with manager.context():
                    loss = F.cross_entropy(module(x).float(), y)
                manager.backward(loss)
            update = manager.step(module, optimizer)
            results.append(update.loss)
        assert list(update.layer_norms) == [name for name, _ in model.named_parameters()]
    assert results[:4] == pytest.approx(results[4:], rel=2e-2)
    assert "CompiledFunctionBackward" in str(operators_not_observed(compiled, batches(1)[0]))


def operators_not_observed(module: nn.Module, batch: tuple[Tensor, Tensor]) -> object:
    manager = MixedPrecisionManager(precision="bf16")
    with manager.context():
        loss = F.cross_entropy(module(batch[0]).float(), batch[1])
    manager.backward(loss)
    return manager.report()["operators"]["not_observed"]
