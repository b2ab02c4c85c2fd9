"""The reference twin itself, held against torch's own optimizers, clipping and loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfstep.engine.reference import SGD, Adam, AdamW, LossScale, Term, clip_coefficient, group_gradient, norm


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (4,), ()]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(
    ("twin", "theirs", "settings_"),
    [
        (SGD, torch.optim.SGD, {}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
        (SGD, torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
        (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
        (Adam, torch.optim.Adam, {"amsgrad": True, "betas": (0.5, 0.6)}),
        (AdamW, torch.optim.AdamW, {}),
        (AdamW, torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.2, "eps": 1e-3}),
    ],
)
def test_optimizers_are_torchs(twin: Any, theirs: Any, settings_: dict[str, Any]) -> None:
    ours, parameters = tensors(0), [torch.nn.Parameter(tensor) for tensor in tensors(0)]
    reference = twin(ours, lr=0.05, **settings_)
    optimizer = theirs(parameters, lr=0.05, **settings_)
    for update in range(6):
        gradients: list[Tensor | None] = [g * (2.0 if update < 3 else 0.1) for g in tensors(update + 1)]
        if update in (0, 3):
            gradients[1] = None  # no gradient: no decay, no momentum, no count
        reference.update(gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        for tensor, parameter in zip(ours, parameters, strict=True):
            torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-13, atol=1e-14)


@settings(max_examples=30, deadline=None)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=12),
    init=st.sampled_from([1.0, 2.0**16, 2.0**126]),
    growth=st.sampled_from([2.0, 1.5]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 3),
)
def test_the_loss_scale_moves_as_torchs(
    overflows: list[bool], init: float, growth: float, backoff: float, interval: int
) -> None:
    settings_ = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    scaler = torch.amp.GradScaler("cpu", init_scale=init, **settings_)
    twin = LossScale(scale=init, **settings_)  # type: ignore[arg-type]
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        scaler.scale(parameter * 0.0)
        parameter.grad = torch.tensor(float("nan") if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        twin.move(overflow)
        assert twin.scale == pytest.approx(scaler.get_scale(), rel=1e-6)
        assert twin.growth_tracker == scaler.state_dict()["_growth_tracker"]


def test_the_loss_scale_has_a_floor_and_may_stand_still() -> None:
    scale = LossScale(scale=4.0, min_scale=2.0, growth_interval=1)
    scale.move(True)
    scale.move(True)
    assert scale.scale == 2.0
    scale.move(False)
    assert scale.scale == 4.0
    still = LossScale(scale=8.0, dynamic=False)
    still.move(True)
    assert still.scale == 8.0


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clipping_is_torchs(max_norm: float) -> None:
    gradients = tensors(3)
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    total = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert norm(gradients) == pytest.approx(float(total), rel=1e-14)
    coefficient = clip_coefficient(norm(gradients), max_norm)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient * coefficient, parameter.grad, rtol=1e-14, atol=0)


def test_the_objective_is_never_a_mean_of_means() -> None:
    """512 tokens of mean 2 and 1,536 of mean 4 give 3.5; a second term has its own denominator."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    tokens = [(512, 2.0), (1536, 4.0)]

    def micro_batch(count: int, mean: float, examples: int) -> list[Term]:
        elements = [scale * (mean + (-1) ** i) for i in range(count)]
        return [Term(elements, count), Term([scale * 10.0] * examples, examples)]

    group = group_gradient([scale], [lambda c=c, m=m: micro_batch(c, m, 3 if c == 512 else 1) for c, m in tokens])
    assert group.loss == pytest.approx(3.5 + 10.0, rel=1e-14)
    assert group.weights == (2048, 4)
    assert float(group.gradients[0]) == pytest.approx(13.5, rel=1e-14)  # type: ignore[arg-type]
    assert group.contribution_norms == pytest.approx((512 * 2 / 2048 + 7.5, 1536 * 4 / 2048 + 2.5), rel=1e-14)


def test_what_weighs_nothing_contributes_nothing_even_when_its_loss_is_nan() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    unused = torch.ones((), dtype=torch.float64, requires_grad=True)
    nothing = lambda: [Term([weight * float("nan")], 0)]  # noqa: E731
    group = group_gradient([weight, unused], [nothing, lambda: [Term([weight * 3.0, weight], 2)]])
    assert group.gradients == [2.0, None]
    assert group.loss == 2.0
    empty = group_gradient([weight], [nothing, nothing])
    assert empty.gradients == [None]
    assert (empty.loss, empty.weights) == (0.0, (0,))
