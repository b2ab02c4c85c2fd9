"""compare: one micro-batch in half precision and in FP32, against hand-written passes; and nothing changes."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import MisuseError, PolicyError
from halfstep.probe.micro_batch.compare import explained
from halfstep.probe.micro_batch.comparison import Comparison
from halfstep.probe.micro_batch.exponents import LOWEST_SCALE
from halfstep.probe.micro_batch.noise import rounding_error
from halfstep.probe.micro_batch.passes import Passes

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Its middle layer explodes where ``gain`` is large: the input is multiplied before it."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.first = nn.Linear(6, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.middle(F.relu(self.first(x)) * self.gain)
        return self.head(F.relu(x))


def network(gain: float = 1.0, **more: nn.Module) -> Net:
    torch.manual_seed(3)
    net = Net(gain)
    for name, module in more.items():
        setattr(net, name, module)
    return net


def examples(count: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def apart(half: Tensor, full: Tensor) -> float:
    return ((half.double() - full.double()).norm() / full.double().norm()).item()


def test_errors_are_those_of_hand_written_passes() -> None:
    model, batch = network(), examples()
    found = halfstep.compare(model, loss_of, batch, precision="bf16")
    outputs: dict[bool, dict[str, Tensor]] = {}
    arrived: dict[bool, Tensor] = {}
    gradients: dict[bool, list[Tensor]] = {}
    for half in (False, True):
        outputs[half] = {}
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            hidden = F.relu(model.first(batch[0]))
            middle = outputs[half]["middle"] = model.middle(hidden)
            logits = outputs[half]["head"] = model.head(F.relu(middle))
            loss = F.cross_entropy(logits, batch[1])
        gradients[half] = list(torch.autograd.grad(loss, [middle, *model.parameters()]))
        arrived[half] = gradients[half].pop(0)
        assert (found.loss if half else found.full_loss) == float(loss.detach())
    for name in ("middle", "head"):
        seen = found.module(name)
        assert seen.output is not None
        assert seen.output.error == pytest.approx(apart(outputs[True][name], outputs[False][name]))
        assert seen.output.cosine == pytest.approx(
            F.cosine_similarity(*(outputs[half][name].detach().double().flatten() for half in (True, False)), 0).item()
        )
        assert seen.dtype == "bfloat16"
    seen = found.module("middle")
    assert seen.gradient is not None
    assert seen.weights is not None
    assert found.gradient is not None
    assert seen.gradient.error == pytest.approx(apart(arrived[True], arrived[False]))
    flat = {half: torch.cat([g.flatten() for g in gradients[half]]) for half in gradients}
    assert found.gradient.error == pytest.approx(apart(flat[True], flat[False]))
    weights = {half: torch.cat([g.flatten() for g in gradients[half][2:4]]) for half in gradients}
    assert seen.weights.error == pytest.approx(apart(weights[True], weights[False]))
    assert found.to_blame is False
    assert found.parted is None
    assert found.finite
    assert [m.worst for m in found.modules] == sorted((m.worst for m in found.modules), reverse=True)


def test_the_layer_that_overflows_is_named_with_its_operator_and_numbers() -> None:
    model, batch = network(gain=1e6), examples()
    found = halfstep.compare(model, loss_of, batch, precision="fp16")
    assert found.overflow is not None
    assert found.overflow.module == ""  # the product before the layer is the model's own
    assert (found.overflow.operator, found.overflow.phase, found.overflow.dtype) == ("mul", "forward", "float16")
    assert found.overflow.limit == 65504.0
    hidden = F.relu(model.first(batch[0]))
    assert found.overflow.exact == pytest.approx(hidden.abs().max().item() * 1e6, rel=1e-2)
    assert found.overflow.at is not None
    assert found.overflow.at.file == __file__
    source = Path(__file__).read_text().splitlines()[found.overflow.at.line - 1]
    assert "* self.gain" in source
    assert found.to_blame
    assert found.parted == "middle"

    explodes = network()
    with torch.no_grad():
        explodes.middle.weight.mul_(30000.0)
        explodes.first.weight.mul_(8.0)
    found = halfstep.compare(explodes, loss_of, batch, precision="fp16")
    assert found.overflow is not None
    assert (found.overflow.module, found.overflow.operator) == ("middle", "addmm")
    for words in ("precision is to blame", "addmm in middle", "65504", "FP16 against FP32"):
        assert words.replace("65504", "6.55e+04") in str(found)


def test_a_scale_that_is_too_high_is_told_apart_and_a_fitting_one_suggested() -> None:
    model, batch = network(), examples()
    found = halfstep.compare(model, loss_of, batch, precision="fp16", loss_scale=2.0**30)
    assert found.to_blame is None
    assert found.asked_scale == 2.0**30
    assert found.spoiled
    assert found.scale < 2.0**20
    assert found.gradient is not None
    assert found.gradient.error < 5e-3
    assert found.fit is not None
    assert "only the loss scale" in found.verdict

    def finite(scale: float) -> bool:
        again = halfstep.compare(model, loss_of, batch, precision="fp16", loss_scale=scale)
        return again.finite

    highest = found.fit.scale * 2.0**found.fit.doublings
    assert finite(found.fit.scale)
    assert finite(highest)
    assert not finite(highest * 2)


def tiny_loss(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model, batch) * 1e-6


def test_lost_gradients_are_counted_where_they_are_lost() -> None:
    model, batch = network(), examples()
    found = halfstep.compare(model, tiny_loss, batch, precision="fp16", loss_scale=1.0)
    gradients = []
    for half in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=half):
            middle = model.middle(F.relu(model.first(batch[0])))
            loss = F.cross_entropy(model.head(F.relu(middle)), batch[1]) * 1e-6
        gradients.append(torch.autograd.grad(loss, middle)[0])
    full, half_ = gradients
    seen = found.module("middle")
    zero = (full != 0) & (half_ == 0) & (full.abs() < torch.finfo(torch.float16).smallest_normal)
    assert seen.lost == pytest.approx(float(zero.sum() / (full != 0).sum()))
    assert seen.lost > 0.1
    small = (half_ != 0) & (half_.abs() < torch.finfo(torch.float16).smallest_normal)
    assert seen.subnormal == pytest.approx(float(small.sum() / (full != 0).sum()))
    assert seen.lost_norm == pytest.approx(float(full[zero].norm() / full.norm()), rel=1e-5)
    assert found.to_blame
    assert found.underflow is not None
    assert found.underflow[1] > 0.1
    assert found.fit is not None
    assert found.fit.scale > 2.0**14
    mended = halfstep.compare(model, tiny_loss, batch, precision="fp16", loss_scale=found.fit.scale)
    assert mended.to_blame is False
    assert mended.module("middle").lost == 0.0


class Vanishing(nn.Module):
    """Gradients fall by a factor of a hundred and more a layer: the last one's norm hides what the first ones lose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 1e-2 + x.detach()
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_that_lose_their_gradients_are_named_though_the_whole_agrees() -> None:
    model, batch = Vanishing(), examples()
    found = halfstep.compare(model, loss_of, batch, precision="fp16", loss_scale=1.0)
    assert found.gradient is not None
    assert found.gradient.error < found.tolerance
    assert found.to_blame
    assert found.suspect == found.starved[0] == "layers.0"
    assert "most in layers.0" in found.verdict
    assert found.fit is not None
    mended = halfstep.compare(model, loss_of, batch, precision="fp16", loss_scale=found.fit.scale)
    assert mended.to_blame is False
    assert found.cure().line == f"MixedPrecisionManager(init_scale=2.0**{round(math.log2(found.fit.scale))})"


def test_a_gradient_that_is_nothing_but_noise_is_not_missed() -> None:
    """What is added to every element alike before a normalisation has no gradient, but for FP32's rounding."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inside, self.shift, self.head = nn.Linear(6, 16), nn.Linear(6, 1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.layer_norm(self.inside(x).float() + self.shift(x), (16,)))  # type: ignore[no-any-return]

    found = halfstep.compare(Shifted(), loss_of, examples(), precision="fp16", loss_scale=1.0)
    assert (found.module("shift").lost_norm or 0.0) > found.tolerance
    assert "shift" not in found.starved


def test_a_gradient_that_a_maximum_sent_elsewhere_is_not_lost() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Linear(2, 2, bias=False)
            nn.init.eye_(self.same.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.same(x).max(1).values  # type: ignore[no-any-return]

    x = torch.tensor([[1.0, 1.0001]])  # in FP16 both are 1
    found = halfstep.compare(Pooled(), lambda model, x: model(x).float().sum(), x, precision="fp16", loss_scale=1.0)
    gradient = found.module("same").gradient
    assert gradient is not None
    assert gradient.error > 1.0  # it arrives at the other one
    assert found.module("same").lost == 0.0


def test_what_fp32_cannot_do_either_is_not_blamed_on_precision() -> None:
    def broken(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch) * torch.log(torch.zeros(()))

    found = halfstep.compare(network(), broken, examples(), precision="bf16")
    assert found.to_blame is False
    assert "FP32 gives a loss of" in found.verdict


def with_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return loss_of(model, batch)


def test_autocast_within_is_taken_in_half_and_off_in_fp32() -> None:
    model, batch = network(), examples()
    found = halfstep.compare(model, with_autocast, batch)
    assert found.precision == "fp16"
    assert found.full_loss == loss_of(model, batch).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert halfstep.compare(model, loss_of, batch).full_loss == found.full_loss
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_half_parameters_are_widened_for_fp32() -> None:
    model = network().bfloat16()
    batch = examples()[0].bfloat16(), examples()[1]
    found = halfstep.compare(model, loss_of, batch)
    wide = copy.deepcopy(model).float()
    assert found.full_loss == loss_of(wide, (batch[0].float(), batch[1])).item()
    assert model.first.weight.dtype is torch.bfloat16


def test_casts_that_the_model_writes_are_undone_for_fp32() -> None:
    class Casts(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x)).to(torch.float16) * 1000
            return self.head((hidden * hidden).float() * torch.ones(1, dtype=torch.float16))  # type: ignore[no-any-return]

    torch.manual_seed(3)
    model, batch = Casts(), examples()
    found = halfstep.compare(model, loss_of, batch, precision="fp16")
    exact = model.head((torch.tanh(model.first(batch[0])) * 1000).square())
    assert found.full_loss == pytest.approx(F.cross_entropy(exact, batch[1]).item(), rel=1e-6)
    assert found.overflow is not None
    assert (found.overflow.operator, found.overflow.phase) == ("mul", "forward")


def test_sparse_gradients_are_compared_as_what_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    batch = torch.randint(0, 9, (8, 2)), torch.randint(0, 3, (8,))
    seen = halfstep.compare(model, loss_of, batch, precision="bf16").module("0").weights
    assert seen is not None
    assert 0 < seen.error < 0.1


def test_a_network_that_amplifies_rounding_is_no_fault_of_precision() -> None:
    """Twelve convolutions, each normalised over the batch and cut off by a ReLU: signs decided by the last digit."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(12)]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *blocks, nn.Flatten(), nn.Linear(4 * 36, 3))
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = halfstep.compare(model, loss_of, batch, precision="bf16")
    assert found.gradient is not None
    assert found.rounding is not None
    assert found.gradient.error > explained(torch.bfloat16)
    assert found.rounding / 3 < found.gradient.error < 3 * found.rounding
    assert found.to_blame is False
    assert "random errors of one rounding" in found.verdict
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws)
    strict = halfstep.compare(model, loss_of, batch, precision="bf16", tolerance=0.01)
    assert strict.to_blame
    assert strict.rounding is None


def test_rounding_moves_a_gradient_by_about_itself_where_nothing_amplifies_it() -> None:
    passes = Passes(network(), loss_of, examples())
    reference = passes.full()
    for dtype in (torch.float16, torch.bfloat16):
        unit = torch.finfo(dtype).eps / 2
        assert unit / 4 < rounding_error(passes, reference, dtype) < 4 * unit


class Everything(nn.Module):
    """Dropout, BatchNorm, an in-place operator, a module called twice, a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.tail = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.norm(self.twice(self.twice(x)))))
        self.kept = x.detach() + random.random() * 0.0
        return checkpoint(self.tail, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nothing_changes(precision: Any) -> None:
    torch.manual_seed(0)
    model, batch = Everything(), examples()
    hooked: list[int] = []
    model.tail.register_forward_hook(lambda *_: hooked.append(1))
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.randn_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda p: hooked.append(99))
    before = copy.deepcopy(model.state_dict())
    tensors = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    draws = torch.get_rng_state(), random.getstate()
    model.kept = marker = object()

    found = halfstep.compare(model, loss_of, batch, precision=precision)

    assert found.to_blame is False
    assert found.module("drop").output is not None  # both drew the same mask: else they would have nothing in common
    assert found.module("drop").worst < 0.2
    assert found.module("twice").gradient is not None
    assert model.kept is marker
    assert 99 not in hooked
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]} == tensors
    for parameter, (gradient, value) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, value)
    assert [m.training for m in model.modules()] == modes
    after = [len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert after == hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_session_that_watches_sees_nothing_of_it() -> None:
    model, batch = network(gain=1e6), examples()
    with halfstep.watch() as session:  # type: ignore[operator]
        found = halfstep.compare(model, loss_of, batch, precision="fp16")
        assert found.overflow is not None
        assert session.look.is_open
        assert session.summary.micro_batches == 0
    assert not session.findings


def test_islands_are_islands_here_too() -> None:
    model, batch = network(), examples()
    with torch.no_grad():
        model.middle.weight.mul_(30000.0)
        model.first.weight.mul_(8.0)
    manager = halfstep.MixedPrecisionManager(precision="fp16", device="cpu")
    manager.keep_fp32(model, "middle")
    found = halfstep.compare(model, loss_of, batch, precision="fp16")
    assert found.overflow is not None
    assert found.overflow.module == "head"  # its input, the island's output, is cast down there
    assert found.module("middle").dtype == "float32"


def test_compiled_parts_are_seen_by_the_names_the_script_gave() -> None:
    model, batch = network(), examples()
    plain = halfstep.compare(model, loss_of, batch)
    model.middle = torch.compile(model.middle, backend="eager")  # type: ignore[assignment]
    for compiled in (model, torch.compile(model, backend="eager")):
        found = halfstep.compare(compiled, loss_of, batch)  # type: ignore[arg-type]
        assert {m.name for m in found.modules} == {"", "first", "middle", "head"}
        middle = found.module("middle")
        assert (middle.kind, middle.weights) == ("Linear", plain.module("middle").weights)


def test_it_can_be_read_as_a_table_as_data_and_as_a_chart() -> None:
    found = halfstep.compare(network(), loss_of, examples(), precision="fp16")
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert {m["name"] for m in data["modules"]} == {"", "first", "middle", "head"}
    assert data["verdict"] == found.verdict
    assert data["fit"]["scale"] == found.fit.scale if found.fit else False
    histogram = next(m for m in data["modules"] if m["name"] == "head")["output_exponents"]
    assert sum(histogram["counts"].values()) + histogram["zeros"] == 8 * 3
    rows = [line.split()[0] for line in str(found).splitlines()[-5:]]
    assert rows[0] == "module"
    assert {"first", "middle", "head"} <= set(rows)
    chart = found.exponents()
    assert "middle" in chart
    assert "█" in chart
    broken = halfstep.compare(network(gain=1e6), loss_of, examples(), precision="fp16")
    json.dumps(broken.as_dict(), allow_nan=False)
    assert math.isnan(broken.loss) or broken.overflow


@pytest.mark.parametrize(
    ("loss_fn", "settings", "error"),
    [
        (loss_of, {"precision": "fp32"}, PolicyError),
        (loss_of, {"loss_scale": 0.0}, PolicyError),
        (loss_of, {"loss_scale": math.inf}, PolicyError),
        (loss_of, {"loss_scale": "big"}, PolicyError),
        (loss_of, {"tolerance": -1}, PolicyError),
        (loss_of, {"tolerance": math.nan}, PolicyError),
        (loss_of, {"tolerance": "2%"}, PolicyError),
        ("loss", {}, PolicyError),
        (lambda model, batch: model(batch[0]), {}, MisuseError),
        (lambda model, batch: torch.zeros(()), {}, MisuseError),
        (lambda model, batch: loss_of(network(), batch), {}, MisuseError),
    ],
)
def test_misuse_is_an_error_of_halfsteps_own(
    loss_fn: Callable[..., Tensor], settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        halfstep.compare(network(), loss_fn, examples(), **settings)
    assert caught.value.fix  # type: ignore[attr-defined]
    found: Comparison = halfstep.compare(network(), loss_of, examples())
    with pytest.raises(PolicyError, match="of type function"):
        halfstep.compare(lambda x: x, loss_of, examples())  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="middle"):
        found.module("nowhere")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_that_does_not_repeat_itself_is_not_judged(precision: Any) -> None:
    calls = itertools.count(1)

    def counting(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch) * next(calls)

    with pytest.raises(MisuseError, match="another loss each time"):
        halfstep.compare(network(), counting, examples(), precision=precision, loss_scale=8.0)

    def drawing(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch) * (1 + random.random() + float(torch.rand(())))

    assert halfstep.compare(network(), drawing, examples(), precision=precision, loss_scale=8.0).to_blame is False


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_where_the_caller_has_none(mode: Any) -> None:
    model = network()
    plain = halfstep.compare(model, loss_of, examples())
    with mode():
        found = halfstep.compare(model, loss_of, examples())
        assert (found.loss, found.gradient) == (plain.loss, plain.gradient)
        assert found.cure(torch.optim.SGD(model.parameters(), lr=0.1)).line == ""


def test_a_scale_below_the_usual_floor_is_found_and_said() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(6, 8)

    def steep(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).float() * 1e4).pow(2).mean()

    found = halfstep.compare(model, steep, x, precision="fp16")
    assert found.to_blame is None
    assert found.scale < LOWEST_SCALE
    assert "below 2^-8, where it stops falling" in found.verdict
    assert found.fit is not None
    assert found.fit.doublings >= 3
    settings: dict[str, Any] = {"MixedPrecisionManager": halfstep.MixedPrecisionManager}
    line = found.cure().line.replace("(", '(precision="fp16", device="cpu", ')
    manager = eval(line, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with manager.context():
        loss = steep(model, x)
    manager.backward(loss)
    assert manager.step(model, optimizer).applied
