"""Who made a non-finite value: operator, module, line, cause; what hid it; and that looking changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.events import (
    Event,
    GradientsMeasured,
    NonFinite,
    PositionsCollided,
    ProbabilitiesSaturated,
    StatisticsPoisoned,
    TotalStalled,
)
from halfstep.watch import Session
from halfstep.watch.exact import computed
from halfstep.watch.look import Operation


def watched(work: Callable[[], Any], budget: int | None = None) -> list[Event]:
    """The events of what is done in ``work``. ``budget``: operators after which looks are limited to updates 2^k."""
    session, events = Session(), []
    see = session.judge.see

    def note(event: Event) -> None:
        events.append(event)
        see(event)

    session.judge.see = note  # type: ignore[method-assign]
    if budget is not None:
        session.look.spent = 10**9
    with session:
        work()
    assert not [f.message for f in session.findings if f.rule == "halfstep-internal"]
    return events


def run(script: str, path: Path) -> list[Event]:
    file = path / "script.py"
    file.write_text(
        "import torch\nfrom torch import nn\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n" + script
    )
    code = compile(file.read_text(), str(file), "exec")
    return watched(lambda: exec(code, {"__name__": "script"}))


def of(kind: type[Any], events: list[Event]) -> list[Any]:
    return [e for e in events if type(e) is kind]


class Deep(nn.Module):
    """A cast, an in-place operator and views stand between the overflow and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"body": nn.Linear(4, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inside["body"](x)
        y = h * h
        z = torch.zeros(3, 2, 6, dtype=y.dtype)
        z[1:, 0] = y[:2]
        return z.flatten(1).float().add_(1.0).mul(0.5)


def test_the_first_operator_is_named_with_module_line_and_numbers() -> None:
    net = Deep()
    with torch.no_grad():
        net.inside["body"].weight.fill_(30.0)

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            net(torch.full((3, 4), 20.0)).mean().backward()

    (event,) = of(NonFinite, watched(work))
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "y = h * h" in text)
    assert (event.operator, event.phase, event.cause, event.reached) == ("mul", "forward", "operator", "loss")
    assert event.at.line == line
    assert event.module.startswith("net")
    assert (event.value, event.dtype, event.limit) == ("inf", "float16", 65504.0)
    largest = net.inside["body"](torch.full((3, 4), 20.0)).abs().max().item()
    assert event.peak == pytest.approx(largest, rel=1e-3)
    assert event.exact == pytest.approx(largest**2, rel=2e-3)


def test_gradients_are_the_same_bits_with_a_look_as_without() -> None:
    def train(look: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        net = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(24, 3)
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

        def work() -> None:
            for _ in range(6):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(net(torch.randn(5, 2, 8) * 30), torch.randint(0, 3, (5,)))
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        if look:
            events = watched(work)
            assert of(GradientsMeasured, events)
        else:
            work()
        return [*net.state_dict().values(), torch.rand(2)]

    for a, b in zip(train(False), train(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        ("loss = (w * 0).log().mean()", "log"),
        ("loss = torch.where(w > 9, w, 1 / (w * 0)).mean()", "reciprocal"),
        ("y = w * 1.0; y[0] = y[0] / 0.0; loss = y.view(2, 2).t().sum()", "div"),
        ("y = (w * 1e30).square(); loss = y.sum()", "pow"),
        ("loss = (w - 5).sqrt().mean()", "sqrt"),
    ],
)
def test_values_that_no_precision_holds(line: str, operator: str, tmp_path: Path) -> None:
    events = run(f"w = torch.ones(4, requires_grad=True)\n{line}\nloss.backward()\n", tmp_path)
    (event,) = of(NonFinite, events)
    assert (event.operator, event.phase, event.at.line) == (operator, "forward", 6)


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("loss = (w - 1).square().sum().sqrt()", "SqrtBackward0"),
        ("loss = torch.where(w > 2, (w - 1).log(), w).mean()", "LogBackward0"),
        ("loss = (w - 1).abs().pow(0.5).mean()", "PowBackward0"),
        ("loss = torch.acos(w).mean()", "AcosBackward0"),
    ],
)
def test_gradients_are_traced_to_the_forward_line(line: str, node: str, tmp_path: Path) -> None:
    events = run(f"w = torch.ones(4, requires_grad=True)\n{line}\nh = loss * 1\nh.backward()\n", tmp_path)
    (event,) = of(NonFinite, events)
    assert event.phase == "backward" or event.reached == "gradient"
    assert event.at.line == 6
    assert node in (event.node or node)


def test_what_is_meant_or_never_used_names_nobody(tmp_path: Path) -> None:
    script = """
w = torch.randn(4, 4, requires_grad=True)
mask = torch.full((4, 4), float("-inf")).triu(1)
low = torch.full((), float("inf"))
junk = torch.empty(1000)
for i in range(3):
    a = (w + mask).softmax(-1)
    b = w.masked_fill(mask < 0, -torch.inf).logsumexp(-1)
    top, who = w.topk(2, -1)
    c = torch.full_like(w, -torch.inf).scatter(-1, who, top).softmax(-1)
    dead = (w.detach() * 0).log()
    loss = (a + c).square().mean() + b.mean()
    loss.backward()
    low = torch.minimum(low, loss.detach())
"""
    assert not of(NonFinite, run(script, tmp_path))


def test_a_hidden_overflow_matters_only_where_float32_differs(tmp_path: Path) -> None:
    script = """
x = torch.tensor([[300.0, 1.0], [2.0, 1.0]]).half().requires_grad_()
{}
loss.float().backward()
"""
    cases = {
        "loss = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))).sum()": ("pow", "rsqrt"),
        "loss = (x / x.pow(2).sum(-1, keepdim=True)).sum()": ("pow", "div"),
        "loss = x.pow(2).clamp(max=9.0).sum()": None,
        "loss = torch.tanh((x / 6) * (x / 6) * (x / 6)).sum()": None,
        "loss = torch.tanh(x * x * x).sum()": ("mul", None),  # its gradient is 0 times infinity
        "loss = torch.sigmoid(x.pow(2)).sum()": None,
        "loss = (x.float() - x.pow(2).detach().float().clamp(max=7)).softmax(-1)[0, 0]": None,
    }
    for line, found in cases.items():
        events = of(NonFinite, run(script.format(line), tmp_path))
        assert [(e.operator, e.absorbed) for e in events] == ([found] if found else []), line


@pytest.mark.parametrize(
    ("script", "cause", "line", "numbers"),
    [
        (
            "w = torch.ones(2, 3, requires_grad=True)\n"
            "bias = torch.tensor([[0.0, 0, 0], [-torch.inf] * 3])\n"
            "p = (w + bias).softmax(-1)\n"
            "p.nan_to_num().sum().backward()\n",
            "masked",
            7,
            {"count": 1, "of": 2},
        ),
        (
            "w = torch.ones(2, 3).half().requires_grad_()\n"
            "s = torch.where(torch.tensor([[True], [False]]), w, -1e9)\n"
            "s.softmax(-1).float().sum().backward()\n",
            "constant",
            6,
            {"constant": -1e9},
        ),
        (
            "w = torch.zeros(2, 3).half().requires_grad_()\n"
            "z = w / (w.norm(dim=-1, keepdim=True) + 1e-8)\n"
            "z.float().sum().backward()\n",
            "epsilon",
            6,
            {"constant": 1e-8},
        ),
        (
            "w = torch.full((4,), 20.0).half().requires_grad_()\n"
            "p = w.sigmoid()\n"
            "(1 - p).log().float().sum().backward()\n",
            "probability",
            7,
            {"count": 4},
        ),
        (
            "w = torch.ones(70000).half().requires_grad_()\ny = w * 2\ny.sum().float().backward()\n",
            "reduction",
            7,
            {"exact": 140000.0},
        ),
        (
            "x = torch.ones(6, 2)\nx[4, 1] = torch.nan\nnet = nn.Linear(2, 1)\nout = net(x)\nout.mean().backward()\n",
            "input",
            8,
            {"count": 1, "of": 12},
        ),
        (
            "net = nn.Linear(2, 1)\nnet.bias.data.fill_(torch.nan)\nnet(torch.ones(3, 2)).mean().backward()\n",
            "parameter",
            None,
            {},
        ),
        ("w = torch.ones(0, requires_grad=True)\nw.mean().backward()\n", "nothing", 6, {}),
    ],
)
def test_causes(script: str, cause: str, line: int | None, numbers: dict[str, float], tmp_path: Path) -> None:
    (event,) = of(NonFinite, run(script, tmp_path))
    assert event.cause == cause
    assert line is None or event.at.line == line
    for name, value in numbers.items():
        assert getattr(event, name) == pytest.approx(value, rel=1e-3)


def test_rows_and_columns_of_a_bad_micro_batch_are_told(tmp_path: Path) -> None:
    script = """
net = nn.Linear(9, 1)
x = torch.ones(20, 9)
x[3, 5] = x[7, 5] = x[7, 8] = torch.nan
net(x).mean().backward()
"""
    (event,) = of(NonFinite, run(script, tmp_path))
    assert event.hint == (
        "argument 0 of Linear: 3 NaN of 180 elements in 2 of 20 rows (the first is row 3), columns 5 and 8"
    )


def test_what_went_on_from_a_told_value_is_not_told_again() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters())

    def work() -> None:
        for i in range(5):
            x = torch.ones(4, 3)
            if i == 1:
                x[0, 0] = torch.nan
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()

    events = of(NonFinite, watched(work))
    assert [e.cause for e in events if e.cause != "parameter"] == ["input"]


def test_statistics_are_told_unless_they_are_put_back() -> None:
    def work(restore: bool) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        for i in range(3):
            x = torch.randn(6, 3)
            if i == 1:
                x[0, 0] = torch.inf
            before = [b.clone() for b in net.buffers()]
            loss = net(x).mean()
            if not torch.isfinite(loss):
                if restore:
                    for buffer, old in zip(net.buffers(), before, strict=True):
                        buffer.copy_(old)
                continue
            loss.backward()

    (event,) = of(StatisticsPoisoned, watched(lambda: work(False)))
    assert event.module == "net.1"
    assert event.buffers == ("running_mean", "running_var")
    assert event.weights
    assert not of(StatisticsPoisoned, watched(lambda: work(True)))


def test_saturated_probabilities_count_only_against_the_target() -> None:
    def work(target: float) -> None:
        z = torch.tensor([20.0, 30.0, 0.0, -1.0]).half().requires_grad_()
        nn.functional.binary_cross_entropy(z.sigmoid().float(), torch.full((4,), target)).backward()

    (event,) = of(ProbabilitiesSaturated, watched(lambda: work(0.0)))
    assert (event.count, event.of, event.operator, event.dtype) == (2, 4, "sigmoid", "float16")
    assert not of(ProbabilitiesSaturated, watched(lambda: work(1.0)))


@pytest.mark.parametrize(("dtype", "exact"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_positions_collide_beyond_what_the_dtype_counts(dtype: torch.dtype, exact: int) -> None:
    assert not of(PositionsCollided, watched(lambda: torch.arange(exact + 1).to(dtype)))
    (event,) = of(PositionsCollided, watched(lambda: torch.arange(exact + 4)[None, :, None].expand(2, -1, 3).to(dtype)))
    rounded = torch.arange(exact + 4).to(dtype)
    assert (event.count, event.distinct) == (exact + 4, rounded.unique().numel())
    assert event.first == (exact, exact + 1)
    noise = torch.randn(4000) * 1000
    assert not of(
        PositionsCollided, watched(lambda: (noise.to(dtype), noise.round().to(dtype), torch.ones(900).to(dtype)))
    )


def test_a_total_is_told_when_it_stands_still() -> None:
    def work(dtype: torch.dtype, additions: int) -> None:
        total = torch.zeros((), dtype=dtype)
        for _ in range(additions):
            total += torch.ones((), dtype=dtype)

    events = of(TotalStalled, watched(lambda: work(torch.bfloat16, 300)))
    assert events
    assert events[0].total == 256.0
    assert events[0].times >= 3
    assert not of(TotalStalled, watched(lambda: work(torch.bfloat16, 250)))
    assert not of(TotalStalled, watched(lambda: work(torch.float32, 300)))


def test_measured_losses_are_those_of_a_float32_backward() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    x = torch.randn(64, 6)

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (net(x) * 1e-3).square().mean()
        loss.backward()

    (event,) = of(GradientsMeasured, watched(work))
    half = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    (net(x) * 1e-3).square().mean().backward()
    for layer in event.layers:
        name = layer.name.removeprefix("net.")
        exact = net.get_parameter(name).grad
        assert exact is not None
        assert layer.kept == int((exact != 0).sum())
        assert layer.lost == int(((half[name] == 0) & (exact != 0)).sum())
        true = float((half[name] - exact).norm() / exact.norm())
        assert layer.missing == pytest.approx(true, abs=0.02)
    assert max(layer.missing for layer in event.layers) > 0.5
    assert event.fitting is not None
    assert event.fitting >= 2.0**10
    for layer in event.activations:
        assert sum(layer.exponents.values()) == layer.elements - (layer.elements - layer.kept) - layer.lost
        assert all(-24 <= exponent <= 15 for exponent in layer.exponents)


def test_an_operator_is_computed_again_in_float32_only_where_that_is_safe() -> None:
    def again(func: Any, *args: Any, **kwargs: Any) -> Any:
        return computed(Operation(func, args, kwargs, False, lambda: None))

    aten = torch.ops.aten
    x = torch.full((3,), 300.0).half()
    assert again(aten.pow.Tensor_Scalar, x, 2).dtype is torch.float32
    assert math.isclose(float(again(aten.pow.Tensor_Scalar, x, 2)[0]), 90000.0)
    assert again(aten._to_copy.default, torch.tensor([1e6]), dtype=torch.float16).item() == 1e6
    assert again(aten.mul_.Tensor, x, x) is None
    assert again(aten.bernoulli.default, x) is None
    assert float(x[0]) == 300.0
