"""The engine against its slow twin: random models, splits, ragged weights, overflows, optimizers, precisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.runs import (
    RELATIVE,
    Engine,
    Run,
    bad,
    batch,
    detached,
    examples,
    off,
    run_of,
    runs,
    twin_of,
    update_twin,
)

from halfstep.engine.reference import LossScale
from halfstep.errors import ScaleFloorError


def assert_same_run(run: Run, precision: str, tolerance: float, *, see: bool = True, fused: bool = False) -> None:
    """Every update's outcome, numbers and gradient, every parameter after it, and the counters at the end."""
    engine = Engine(run, precision, see=see, fused=fused)
    net, reference = twin_of(run)
    relative = RELATIVE[precision]
    for group, update in zip(run.groups(), engine.updates(), strict=True):
        expected = update_twin(net, reference, group, run.terms)
        size = sum(expected.contribution_norms)
        assert update.outcome == expected.outcome
        assert update.lr == pytest.approx(expected.lr, rel=1e-12)
        assert update.micro_batches == len(group)
        assert update.attempted_updates == reference.attempted_updates
        assert update.applied_updates == reference.applied_updates
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in engine.net.parameters())
        if run.flow != "plain":
            assert update.weight == expected.weight
        if expected.outcome == "applied":
            assert update.loss == pytest.approx(expected.loss, rel=relative, abs=relative)
            assert update.grad_norm == pytest.approx(expected.grad_norm, abs=relative * size + 1e-15)
            if see:
                clipped = [None if g is None else g * expected.clip_coefficient for g in expected.gradients]
                slack = relative * size * (1 if expected.clip_coefficient == 1 else 2)  # the norm's own error
                assert off(engine.handed, clipped) <= slack + 1e-15
            if run.max_norm is not None:
                assert update.clip_coefficient == pytest.approx(expected.clip_coefficient, rel=2 * tolerance)
        assert off(detached(engine.net), detached(net)) <= tolerance


@examples(50)
@given(run=runs())
def test_every_update_in_fp64_is_the_twins(run: Run) -> None:
    assert_same_run(run, "fp64", 1e-10)


@examples(35)
@given(run=runs(hidden=6), fused=st.booleans())
def test_every_update_in_fp32_is_the_twins_folded_or_not(run: Run, fused: bool) -> None:
    assert_same_run(run, "fp32", 2e-5, see=not fused, fused=fused)


@examples(20)
@given(run=runs(most=4, hidden=8))
def test_every_gradient_in_bf16_is_the_twins(run: Run) -> None:
    assert_same_first_update(run, "bf16")


@examples(5)
@given(run=runs(most=4, hidden=8))
def test_every_gradient_in_fp16_is_the_twins(run: Run) -> None:
    assert_same_first_update(run, "fp16", init_scale=2.0**8)


def assert_same_first_update(run: Run, precision: str, **policy: float) -> None:
    """The first update only: in half precision trajectories drift apart, as they should."""
    engine = Engine(run, precision, see=True, **policy)
    net, reference = twin_of(run, LossScale(scale=policy["init_scale"]) if policy else None)
    expected = update_twin(net, reference, run.groups()[0], run.terms)
    update = next(engine.updates())
    assert update.outcome == expected.outcome
    assert update.scale == expected.scale
    if expected.outcome == "applied":
        slack = RELATIVE[precision] * sum(expected.contribution_norms) + 1e-6
        assert update.grad_norm == pytest.approx(expected.grad_norm, abs=slack)
        unclipped = [None if g is None else g / update.clip_coefficient for g in engine.handed]
        assert off(unclipped, expected.gradients) <= slack


@examples(5)
@given(
    overflows=st.lists(st.booleans(), min_size=3, max_size=6),
    interval=st.integers(1, 2),
    backoff=st.sampled_from([0.5, 0.25]),
)
def test_the_scales_path_is_the_twins(overflows: list[bool], interval: int, backoff: float) -> None:
    policy = {"growth_interval": interval, "backoff_factor": backoff, "min_scale": 16.0}
    run = run_of([bad(k) if overflow else batch(k) for k, overflow in enumerate(overflows)], 1)
    engine = Engine(run, "fp16", init_scale=64.0, **policy)
    scale = LossScale(scale=64.0, **policy)  # type: ignore[arg-type]
    net, reference = twin_of(run, scale)
    updates, touches = engine.updates(), 0
    for group, overflow in zip(run.groups(), overflows, strict=True):
        touches = touches + 1 if overflow and scale.scale * backoff < 16.0 else 0
        if touches == 3:
            with pytest.raises(ScaleFloorError):
                next(updates)
            return
        expected, update = update_twin(net, reference, group, run.terms), next(updates)
        assert (update.outcome, update.scale) == (expected.outcome, expected.scale)
        assert engine.manager.loss_scale == scale.scale
        assert engine.manager.scaler.state_dict()["_growth_tracker"] == scale.growth_tracker
