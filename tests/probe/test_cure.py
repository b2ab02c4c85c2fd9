"""Comparison.cure: remedies tried by running the micro-batch again; what it proposes makes real updates apply."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep import MisuseError, MixedPrecisionManager, PolicyError
from halfstep.probe.micro_batch.comparison import Comparison
from halfstep.probe.micro_batch.remedies import Cure, Remedy

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Where ``loud`` is large, `up` overflows of large inputs; a normalisation behind it brings them back."""

    def __init__(self, loud: float = 1.0, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gain = gain
        self.first = nn.Linear(6, 16)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 3)
        with torch.no_grad():
            self.first.weight.mul_(loud)
            self.body[1].weight.mul_(loud)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.first(x))
        return self.head(x * self.gain / self.gain)


def examples(count: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def compared(model: nn.Module, loss_fn: Any = loss_of, **settings: Any) -> Comparison:
    return halfstep.compare(model, loss_fn, settings.pop("batch", examples()), **{"precision": "fp16", **settings})


def remedy(cure: Cure, name: str) -> Remedy:
    return next(r for r in cure.remedies if r.name == name)


def applied(model: nn.Module, *patterns: str, init_scale: float = 2.0**12) -> bool:
    """Whether a real FP16 update of this model applies, with these islands."""
    model = copy.deepcopy(model)
    manager = MixedPrecisionManager(precision="fp16", device="cpu", init_scale=init_scale)
    if patterns:
        manager.keep_fp32(model, *patterns)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with manager.context():
        loss = loss_of(model, examples())
    manager.backward(loss)
    return bool(manager.step(model, optimizer).applied)


def test_the_smallest_island_is_found_and_makes_a_real_update_apply() -> None:
    model = Net(loud=700.0)
    found = compared(model)
    cure = found.cure()
    island = remedy(cure, "island")
    assert island.helps
    assert island.error is not None
    assert island.error < found.tolerance
    # Its FP32 output overflows again where the next module takes it in: that one is needed too, the rest is not.
    assert island.line == 'manager.keep_fp32(model, "body.1", "body.2")'
    assert cure.line == island.line
    assert not applied(model)
    assert not applied(model, "body.1")
    assert not applied(model, "body.2")
    assert applied(model, "body.1", "body.2")


def test_an_island_helps_also_in_a_network_that_amplifies_rounding() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(12)]
    model = nn.Sequential(nn.Linear(6, 16), *blocks, nn.Linear(16, 3))
    with torch.no_grad():
        model[0].weight.mul_(1e5)
    island = remedy(compared(model, loss_scale=2.0**10).cure(), "island")
    assert island.line == 'manager.keep_fp32(model, "0", "1.0")'  # the cast of the next layer's input overflows too
    assert island.error is not None
    assert island.error > 0.02


def test_what_does_not_help_is_said_with_numbers() -> None:
    found = compared(Net(loud=700.0))
    cure = found.cure()
    scale, clip, half = (remedy(cure, n) for n in ("first scale", "clipping", "smaller micro-batch"))
    assert scale.helps is False
    assert "before anything is scaled" in scale.seen
    assert clip.helps is False
    assert "acts after the unscale" in clip.seen
    assert "the norm is nan" in clip.seen or "the norm is inf" in clip.seen
    assert half.helps is False
    assert "along dimension 0" in half.seen
    assert "2 of the 2 halves break" in half.seen
    assert remedy(cure, "lower learning rate").helps is None
    normal = remedy(cure, "normalisation")
    assert normal.helps
    assert "nn.LayerNorm(16)" in normal.line
    assert "model.body[1]" in normal.line
    bf16 = remedy(cure, "BF16")
    assert bf16.helps
    assert bf16.line == 'MixedPrecisionManager(precision="bf16")'
    shown = str(cure)
    for words in ("remedy", "island", "yes", "no", "paste"):
        assert words in shown
    json.dumps(cure.as_dict(), allow_nan=False)


def test_the_normalisation_that_is_proposed_is_the_one_that_was_tried() -> None:
    model = Net(loud=700.0)
    model.body[1] = nn.Sequential(nn.LayerNorm(16), model.body[1])
    assert compared(model).to_blame is False
    assert applied(model)


def test_an_operator_between_modules_is_cured_by_its_region() -> None:
    found = compared(Net(gain=1e6))
    assert found.overflow is not None
    assert found.overflow.module == ""
    cure = found.cure()
    region = remedy(cure, "operator region")
    assert region.helps
    assert f"test_cure.py:{found.overflow.at.line if found.overflow.at else 0}" in region.line
    assert "full_precision" in cure.line
    assert remedy(cure, "island").helps is None


def test_a_scale_that_is_too_high_needs_only_another() -> None:
    model = Net()
    cure = compared(model, loss_scale=2.0**30).cure()
    assert cure.best is not None
    assert cure.best.name == "first scale"
    power = int(cure.line.split("**")[1].rstrip(")"))
    assert not applied(model, init_scale=2.0**30)
    assert applied(model, init_scale=2.0**power)
    assert [r.name for r in cure.remedies] == ["first scale", "clipping"]


def test_lost_gradients_are_cured_by_a_higher_scale() -> None:
    def tiny(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch) * 1e-6

    model = Net()
    found = compared(model, tiny, loss_scale=1.0)
    assert found.to_blame
    cure = found.cure()
    scale = remedy(cure, "first scale")
    assert scale.helps
    assert scale.error is not None
    assert scale.error < 5e-3
    assert "stays lost" in remedy(cure, "clipping").seen
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rate = remedy(found.cure(optimizer, updates=1), "lower learning rate").seen
    assert "lost to zero" in rate
    assert "too large" not in rate


class Sums(nn.Module):
    """A half-precision product adds up the examples: fewer of them fit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.full((1, len(x)), 12000.0)
        return torch.mm(ones, self.linear(x).abs() * 0 + 1.0) / 1e4 + self.linear(x).mean(0)


def test_a_smaller_micro_batch_helps_where_examples_add_up() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1][:1])

    found = compared(Sums(), loss)
    assert found.to_blame
    smaller = remedy(found.cure(), "smaller micro-batch")
    assert smaller.helps
    assert smaller.what == "4 examples for 8"
    assert "2 * A" in smaller.line


@pytest.mark.parametrize("grown", [False, True])
def test_a_lower_rate_for_the_layer_is_tried_on_copies(grown: bool) -> None:
    model = Net(loud=700.0 if grown else 1.0)

    def grows(module: nn.Module, batch: Batch) -> Tensor:
        return loss_of(module, batch) - module.get_parameter("body.1.weight").sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=12000.0, momentum=0.0)
    optimizer.param_groups[0]["params"] = [model.body[1].weight]
    before = copy.deepcopy(model.state_dict())
    found = compared(model, grows, loss_scale=2.0**8)
    assert bool(found.to_blame) is grown
    tried = remedy(found.cure(optimizer, updates=4, rate=0.01), "lower learning rate")
    assert tried.helps is not grown
    assert "after 4 updates" in tried.seen
    assert ("at either rate" in tried.seen) is grown
    assert ("body" in tried.what) or not grown
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_rate_at_which_fp32_itself_diverges_is_no_cure() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * 500).pow(2).sum(-1)

    model = Squares()
    found = halfstep.compare(model, lambda m, x: m(x).float().mean(), examples()[0], precision="fp16")
    tried = remedy(found.cure(torch.optim.SGD(model.parameters(), lr=1.0)), "lower learning rate")
    assert tried.helps is False


def test_true_gradients_beyond_the_range_want_a_scale_below_one() -> None:
    torch.manual_seed(0)
    found = halfstep.compare(
        nn.Linear(6, 4), lambda m, x: (m(x) * 1e5).float().sum(), examples()[0] * 0.1, precision="fp16"
    )
    assert found.overflow is not None
    assert found.overflow.phase == "backward"
    assert found.to_blame is None
    assert found.scale < 1.0
    assert found.cure().line.startswith("MixedPrecisionManager(init_scale=2.0**-")


def test_nothing_changes_and_nothing_is_tried_where_nothing_is_wrong() -> None:
    cure = compared(Net(), loss_scale=2.0**8).cure()
    assert cure.remedies == ()
    assert cure.line == ""
    assert "nothing to cure" in str(cure)

    model = Net(loud=700.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    before = functorch_config.backward_pass_autocast, torch.get_rng_state()
    compared(model).cure(optimizer, updates=2)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert functorch_config.backward_pass_autocast == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not optimizer.state


def test_a_loss_that_fp32_cannot_compute_is_not_for_precision_to_cure() -> None:
    cure = compared(Net(), lambda m, b: loss_of(m, b) / torch.zeros(())).cure()
    assert cure.line == ""
    assert "FP32 is not finite either" in str(cure)


def test_where_digits_are_lost_the_module_that_loses_them_becomes_the_island() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    with torch.no_grad():
        model[0].bias.fill_(300.0)  # BF16 has steps of 2 there, and the normalisation takes the 300 away
    found = halfstep.compare(model, loss_of, examples(), precision="bf16")
    assert found.to_blame
    assert found.parted == "1"
    cure = found.cure()
    assert cure.line == 'manager.keep_fp32(model, "0")'
    assert remedy(cure, "BF16").helps is None


def test_where_nothing_helps_it_says_so() -> None:
    def cancelled(model: nn.Module, x: Tensor) -> Tensor:
        return ((model(x) + 1000.0) - 1000.0).pow(2).mean()

    cure = halfstep.compare(nn.Linear(6, 1), cancelled, examples()[0], precision="bf16").cure()
    assert cure.line == ""
    assert str(cure).splitlines()[-1].startswith("nothing that was tried helps")


def test_another_models_optimizer_and_other_misuse_are_refused() -> None:
    found = compared(Net(), loss_scale=2.0**8)
    with pytest.raises(MisuseError, match="no parameter of this model"):
        found.cure(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    wrong: list[dict[str, Any]] = [{"optimizer": "adam"}, {"updates": 0}, {"rate": -1.0}, {"max_norm": None}]
    for given in wrong:
        with pytest.raises(PolicyError):
            found.cure(**given)
