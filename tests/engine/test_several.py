"""Several optimizers, several backwards, penalties on gradients, tensors and metrics looked at by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import MisuseError, MixedPrecisionManager, NonFiniteError

PRECISIONS = ["fp32", "bf16", "fp16"]


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 6), nn.Linear(6, 3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [(True, True), (True, False), (False, False)])
def test_one_backward_shared_by_two_optimizers(precision: str, fused: tuple[bool, bool], late: bool) -> None:
    """One joint norm, one clip, one outcome."""
    body, head = pair()
    twins = copy.deepcopy((body, head))
    optimizers = [
        torch.optim.AdamW(body.parameters(), lr=0.01, fused=fused[0]),
        torch.optim.SGD(head.parameters(), lr=0.1, fused=fused[1]),
    ]
    by_hand = [torch.optim.AdamW(twins[0].parameters(), lr=0.01), torch.optim.SGD(twins[1].parameters(), lr=0.1)]
    manager = MixedPrecisionManager(precision=precision, max_norm=0.2, init_scale=256.0)
    torch.manual_seed(1)
    for number in range(4):
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        overflow = number == 2
        loss = F.cross_entropy(head(body(x)), y)
        manager.backward(loss * float("inf") if overflow else loss)
        update = manager.step((body, head), optimizers)
        assert update.skipped is overflow
        if overflow:
            continue
        F.cross_entropy(twins[1](twins[0](x)), y).backward()
        norm = nn.utils.clip_grad_norm_([*twins[0].parameters(), *twins[1].parameters()], 0.2)
        assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert set(update.layer_norms) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        for optimizer in by_hand:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(
        [*body.parameters(), *head.parameters()], [*twins[0].parameters(), *twins[1].parameters()], strict=True
    ):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_losses_on_two_models_each_with_its_own_update(precision: str) -> None:
    """Actor and critic: disjoint graphs, both backwards before both updates, no ``inputs`` needed."""
    actor, critic = nn.Linear(3, 2), nn.Linear(3, 1)
    of_actor = torch.optim.AdamW(actor.parameters(), fused=True)
    of_critic = torch.optim.AdamW(critic.parameters(), fused=True)
    manager = MixedPrecisionManager(precision=precision)
    for _ in range(3):
        x = torch.ones(4, 3)
        manager.backward(actor(x).float().mean(), weight=4)
        manager.backward(critic(x).float().square().mean(), weight=7)
        one = manager.step(actor, of_actor)
        assert manager.pending == 1
        two = manager.step(critic, of_critic)
        assert (one.weight, two.weight) == (4, 7)
    assert manager.report()["counters"]["applied"] == 6


def test_weights_need_be_of_one_kind_only_on_the_same_parameters() -> None:
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    manager = MixedPrecisionManager(precision="fp32")
    manager.backward(first(torch.ones(2, 3)).square().mean(), weight=2, inputs=first)
    manager.backward(second(torch.ones(2, 3)).square().mean(), inputs=second)
    assert manager.step(first, optimizers[0]).weight == 2
    assert manager.step(second, optimizers[1]).weight is None


def test_gan_inside_groups() -> None:
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    of_generator = torch.optim.AdamW(generator.parameters(), lr=0.01, fused=True)
    of_critic = torch.optim.AdamW(critic.parameters(), lr=0.01, fused=True)
    manager = MixedPrecisionManager(precision="bf16")
    weights = []
    for group in manager.groups([torch.randn(n, 4) for n in (3, 5, 2)], 2, weight=len):
        for real in group:
            with manager.context():
                fake = generator(torch.ones(len(real), 2))
                of_fake, of_real = critic(fake.detach()), critic(real)
            manager.backward((of_fake - of_real).float().mean(), inputs=critic)
            with manager.context():
                fooled = critic(fake)
            manager.backward(-fooled.float().mean(), inputs=list(generator.parameters()))
        weights.append((manager.step(critic, of_critic).weight, manager.step(generator, of_generator).weight))
    assert weights == [(8, 8), (2, 2)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_penalty_on_a_gradient(precision: str) -> None:
    """WGAN-GP: the gradient inside the loss is unscaled, whatever the loss scale."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision=precision, max_norm=None)
    x = torch.randn(5, 4, requires_grad=True)

    (g,) = torch.autograd.grad(twin(x).sum(), x, create_graph=True)
    expected = twin(x).mean() + 10 * (g.norm(dim=1) - 1).square().mean()
    expected.backward(inputs=list(twin.parameters()))

    (g,) = manager.grad(critic(x).sum(), x, create_graph=True)
    manager.backward(critic(x).mean() + 10 * (g.norm(dim=1) - 1).square().mean(), inputs=critic)
    before = [p.detach().clone() for p in critic.parameters()]
    update = manager.step(critic, optimizer)
    assert update.loss == pytest.approx(float(expected.detach()), rel=1e-4)
    for old, p, q in zip(before, critic.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close((old - p.detach()) / 0.1, q.grad, rtol=1e-3, atol=1e-5)
    assert x.grad is None


def test_grad_is_unscaled_and_keeps_torchs_arguments() -> None:
    manager = MixedPrecisionManager(precision="fp16", init_scale=1024.0)
    x = torch.randn(3, requires_grad=True)
    unused = torch.randn(3, requires_grad=True)
    got = manager.grad(x.square(), [x, unused], grad_outputs=torch.full((3,), 0.5), allow_unused=True)
    torch.testing.assert_close(got[0], x.detach())
    assert got[1] is None


def test_checks_look_at_any_tensor() -> None:
    manager = MixedPrecisionManager(precision="fp16")
    good = manager.check(torch.tensor([1.0, -300.0], dtype=torch.float16), "attention")
    assert good
    assert good.largest == 300.0
    assert good.headroom == pytest.approx(65504 / 300)
    bad = manager.check(torch.tensor([1.0, float("inf"), float("nan")]), "scores")
    assert not bad
    assert bad.nonfinite == 2
    assert "2 elements not finite" in repr(bad)
    assert [c["name"] for c in manager.report()["checks"]] == ["attention", "scores"]
    strict = MixedPrecisionManager(precision="fp32", on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match="1 of 2 elements of 'x'"):
        strict.check(torch.tensor([1.0, float("nan")]), "x")


def test_metrics_are_kept_against_applied_updates() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="fp16")
    for overflow in (True, False, False):
        manager.backward(model(torch.ones(1, 2)).sum() * (1e38 if overflow else 1.0))
        manager.step(model, optimizer)
    manager.log(iou=torch.tensor(0.5), note="first")
    assert manager.report()["metrics"] == [{"applied_updates": 2, "iou": 0.5, "note": "first"}]


def test_percentiles_of_the_norm_suggest_a_threshold(late: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    module = nn.Module()
    module.parameter = parameter
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    manager = MixedPrecisionManager(precision="fp32", max_norm=None)
    assert manager.norm_percentiles is None
    for norm in range(1, 101):
        manager.backward((parameter * norm).sum())
        manager.step(module, optimizer)
        if norm == 5:
            assert manager.suggested_max_norm is None
    percentiles = manager.norm_percentiles
    assert percentiles is not None
    assert percentiles["p50"] == pytest.approx(50, abs=1)
    assert percentiles["p99"] == pytest.approx(99, abs=1)
    assert manager.suggested_max_norm == pytest.approx(90, abs=1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_islands_through_the_manager(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, o.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = MixedPrecisionManager(precision=precision)
    manager.keep_fp32(model, "1")
    with manager.context():
        out = model(torch.ones(2, 4))
    manager.backward(out.float().mean())
    assert manager.step(model, optimizer).applied
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen == {"0": half, "1": torch.float32, "2": half}
    record = manager.report()
    assert record["precision"]["kept_in_fp32"] == ["1"]
    assert record["operators"]["dtypes"]["addmm"] == {"float32": 1, str(half).removeprefix("torch."): 2}


def test_an_island_that_never_runs_is_an_error_at_the_first_update() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="bf16")
    manager.keep_fp32(model, "unused")
    with manager.context():
        out = model["used"](torch.ones(1, 2))
    manager.backward(out.float().sum())
    with pytest.raises(MisuseError, match="never ran: unused"):
        manager.step(model, optimizer)


def test_an_island_of_another_model_may_run_later() -> None:
    critic, generator = nn.Linear(4, 1), nn.Linear(2, 4)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="bf16")
    manager.keep_fp32(nn.ModuleList([generator]), "0")
    with manager.context():
        out = critic(torch.ones(1, 4))
    manager.backward(out.float().sum())
    assert manager.step(critic, of_critic).applied


def test_full_precision_by_hand() -> None:
    manager = MixedPrecisionManager(precision="bf16")
    layer = nn.Linear(2, 2)
    with manager.context():
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
        with manager.full_precision():
            assert layer(torch.ones(1, 2)).dtype == torch.float32
        with manager.context():
            assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    off = MixedPrecisionManager(False)
    with off.context(), off.full_precision():
        assert layer(torch.ones(1, 2)).dtype == torch.float32


def test_context_ends_on_exceptions() -> None:
    manager = MixedPrecisionManager(precision="bf16")
    with pytest.raises(ZeroDivisionError), manager.context():
        _ = 1 / 0
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_with_a_loss_module_and_an_average_of_its_weights() -> None:
    """Loss functions may hold parameters; an average of weights is updated after what was applied."""

    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centres = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(x @ self.centres.T, y)

    torch.manual_seed(0)
    model, margin = nn.Linear(4, 4), Margin()
    optimizer = torch.optim.AdamW([*model.parameters(), *margin.parameters()], lr=0.1, fused=True)
    average = torch.optim.swa_utils.AveragedModel(model)
    manager = MixedPrecisionManager(precision="bf16")
    for _ in range(3):
        with manager.context():
            out = model(torch.ones(2, 4))
        manager.backward(margin(out.float(), torch.tensor([0, 1])))
        if manager.step([model, margin], optimizer).applied:
            average.update_parameters(model)
    assert int(average.n_averaged) == 3


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_ascend_by_hand_and_descend_with_the_manager(precision: str) -> None:
    """SAM done right: the ascent takes unscaled gradients, the weights are put back before the update."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision=precision, max_norm=None)
    x = torch.randn(8, 3)

    def ascend(module: nn.Module, gradients: Any) -> list[Tensor]:
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        before = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for p, g in zip(module.parameters(), gradients, strict=True):
                p.add_(g, alpha=0.05 / norm)
        return before

    def put_back(module: nn.Module, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(module.parameters(), values, strict=True):
                p.copy_(value)

    for _ in range(3):
        before = ascend(model, manager.grad(model(x).square().mean(), list(model.parameters())))
        manager.backward(model(x).square().mean())
        put_back(model, before)
        assert manager.step(model, optimizer).applied

        before = ascend(twin, torch.autograd.grad(twin(x).square().mean(), list(twin.parameters())))
        twin(x).square().mean().backward()
        put_back(twin, before)
        by_hand.step()
        by_hand.zero_grad()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-4, atol=1e-6)
