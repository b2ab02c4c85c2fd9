"""Laws 3, 4, 5, 7, 10 and 11, each for itself, against the twin or against the run that never had the accident."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.runs import (
    OPTIMIZERS,
    RELATIVE,
    Engine,
    MicroBatch,
    Net,
    Run,
    bad,
    batch,
    dead,
    elements,
    examples,
    off,
    run_of,
)
from torch import Tensor

from halfstep.engine.reference import group_gradient
from halfstep.errors import MisuseError


def state_of(engine: Engine) -> list[Tensor]:
    """Every tensor of parameters and optimizer state, and the numbers of the schedule."""
    states = engine.optimizer.state_dict()["state"]
    tensors = [torch.as_tensor(v).clone() for s in states.values() for v in s.values() if v is not None]
    rates = [torch.as_tensor(group["lr"]) for group in engine.optimizer.param_groups]
    count = [] if engine.scheduler is None else [torch.tensor(engine.scheduler.last_epoch)]
    return [*(p.detach().clone() for p in engine.net.parameters()), *tensors, *rates, *count]


def assert_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


# --- law 7: split invariance --------------------------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn) -> tuple[Run, MicroBatch]:
    """One big batch, cut anywhere into the micro-batches of one group."""
    whole = batch(draw(st.integers(0, 2**31)), m=draw(st.integers(2, 9)), length=draw(st.integers(1, 4)), width=4)
    cuts = sorted(draw(st.sets(st.integers(1, len(whole.x) - 1), max_size=5)))
    edges = [0, *cuts, len(whole.x)]
    parts = [MicroBatch(whole.x[a:b], whole.labels[a:b]) for a, b in itertools.pairwise(edges)]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    flow = draw(st.sampled_from(["ahead", "graph", "sum", "divided", "along", "plain"]))
    return run_of(parts, len(parts), flow, net=Net(4, 8, 4), max_norm=None, lr=1.0, decay=None), whole


def assert_split_invariant(run: Run, whole: MicroBatch, precision: str, **policy: Any) -> None:
    engine = Engine(run, precision, see=True, **policy)
    (update,) = list(engine.updates())
    assert update.applied
    twin = Net(4, 8, 4).double()
    twin.load_state_dict(run.net.state_dict())
    parameters = list(twin.parameters())
    big = group_gradient(parameters, [lambda: elements(twin, whole)])
    parts = group_gradient(parameters, [lambda b=part: elements(twin, b) for part in run.micro_batches])  # type: ignore[misc]
    assert off(engine.handed, big.gradients) <= RELATIVE[precision] * sum(parts.contribution_norms)
    assert update.weight is None or update.weight == whole.live()


@examples(40)
@given(case=splits(), precision=st.sampled_from(["fp64", "fp32", "bf16"]))
def test_any_split_gives_the_big_batchs_gradient(case: tuple[Run, MicroBatch], precision: str) -> None:
    assert_split_invariant(*case, precision)


@examples(6)
@given(case=splits())
def test_any_split_gives_the_big_batchs_gradient_in_fp16(case: tuple[Run, MicroBatch]) -> None:
    assert_split_invariant(*case, "fp16", init_scale=2.0**10)


# --- law 3: one scale a group -------------------------------------------------------------------------------------


def test_the_scale_stands_still_in_a_group_and_moves_once_after_it() -> None:
    run = run_of([batch(1), bad(2), batch(3), batch(4)], 2, "along")
    engine = Engine(run, "fp16", init_scale=2.0**9, growth_interval=1)
    manager = engine.manager
    seen = []
    for group in run.groups():
        for part in group:
            seen.append(manager.loss_scale)
            manager.backward(engine.loss(part), weight=part.live())
            with pytest.raises(MisuseError):
                manager.loss_scale = 2.0
            seen.append(manager.loss_scale)
        update = engine.step()
        assert update.scale == seen[-1]
        seen.append(manager.loss_scale)
    assert seen == [512.0] * 4 + [256.0] * 5 + [512.0]


# --- law 4: clip what is real -------------------------------------------------------------------------------------


@pytest.mark.parametrize("init_scale", [1.0, 2.0**10])
def test_the_norm_is_that_of_the_unscaled_whole_group(init_scale: float) -> None:
    parts = [batch(1), batch(2, m=3), batch(3, live=0.3)]
    run = run_of(parts, 3, max_norm=0.05, decay=None)
    engine = Engine(run, "fp16", see=True, init_scale=init_scale)
    (update,) = list(engine.updates())
    twin = Net(3, 5, 4).double()
    twin.load_state_dict(run.net.state_dict())
    whole = group_gradient(list(twin.parameters()), [lambda b=b: elements(twin, b) for b in parts])  # type: ignore[misc]
    true = float(torch.cat([g.flatten() for g in whole.gradients if g is not None]).norm())
    assert update.grad_norm == pytest.approx(true, rel=1e-2)
    assert true > 0.1
    assert update.clip_coefficient == pytest.approx(0.05 / true, rel=1e-2)
    handed = torch.cat([g.flatten() for g in engine.handed if g is not None])
    assert float(handed.norm()) == pytest.approx(0.05, rel=1e-3)
    assert sum(norm**2 for norm in update.layer_norms.values()) ** 0.5 == pytest.approx(update.grad_norm, rel=1e-5)


# --- law 5: a skip changes nothing --------------------------------------------------------------------------------

KINDS = [(optimizer, fused) for optimizer in OPTIMIZERS for fused in (False, True)]


@pytest.mark.parametrize("at", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize(("optimizer", "fused"), KINDS)
def test_after_a_skip_all_is_as_if_its_group_had_never_been(optimizer: Any, fused: bool, at: int) -> None:
    good = [batch(k) for k in range(6)]
    with_accident = [*good[: 2 * at], good[0], bad(9), *good[2 * at :]]
    engine = Engine(run_of(with_accident, 2, optimizer=optimizer), "fp32", fused=fused)
    twin = Engine(run_of(good, 2, optimizer=optimizer), "fp32", fused=fused)
    outcomes = [update.outcome for update in engine.updates()]
    assert outcomes == ["skipped" if k == at else "applied" for k in range(4)]
    assert [update.outcome for update in twin.updates()] == ["applied"] * 3
    assert_bits(state_of(engine), state_of(twin))


@pytest.mark.parametrize(("optimizer", "fused"), KINDS)
def test_a_skipped_update_leaves_every_bit_and_clears_the_gradients(optimizer: Any, fused: bool) -> None:
    run = run_of([batch(1), bad(2)], 1, "along", optimizer=optimizer)
    engine = Engine(run, "fp32", fused=fused)
    for position, part in enumerate(run.micro_batches):
        engine.manager.backward(engine.loss(part), weight=part.live())
        before = state_of(engine)
        update = engine.step()
        if position == 1:
            assert update.skipped
            assert_bits(state_of(engine), before)
            assert all(p.grad is None for p in engine.net.parameters())
            assert (update.attempted_updates, update.applied_updates) == (2, 1)


def test_an_fp16_overflow_skips_lowers_the_scale_and_leaves_the_rest() -> None:
    engine = Engine(run_of([bad(1), batch(2)], 1), "fp16", fused=True, init_scale=2.0**8)
    before = [p.detach().clone() for p in engine.net.parameters()]
    updates = engine.updates()
    assert next(updates).skipped
    assert_bits([p.detach() for p in engine.net.parameters()], before)
    assert engine.manager.loss_scale == 2.0**7
    assert next(updates).applied
    assert engine.scheduler is not None
    assert engine.scheduler.last_epoch == 1


# --- law 10: nothing supervised -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", ["ahead", "graph", "sum", "along"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_micro_batch_that_supervises_nothing_is_as_if_absent(flow: str, precision: str) -> None:
    parts = [batch(1), batch(2), batch(3)]
    where = [*parts[:1], dead(7), *parts[1:], dead(8)]
    engine, twin = (Engine(run_of(b, len(b), flow, decay=None), precision) for b in (where, parts))
    (ours,), (theirs,) = list(engine.updates()), list(twin.updates())
    assert ours.applied
    assert ours.weight == theirs.weight
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    if flow != "graph":
        assert_bits(state_of(engine), state_of(twin))
    else:  # weights that are read are anchored to the group's length, dead micro-batches included
        for one, other in zip(state_of(engine), state_of(twin), strict=True):
            torch.testing.assert_close(one, other, rtol={"fp64": 1e-12, "fp32": 1e-5}.get(precision, 1e-2), atol=1e-6)


@pytest.mark.parametrize("flow", ["ahead", "graph", "sum", "along"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_group_that_supervises_nothing_is_an_empty_update(flow: str, precision: str) -> None:
    policy = {"init_scale": 2.0**8, "growth_interval": 3} if precision == "fp16" else {}
    good = [batch(1), batch(2)]
    engine = Engine(run_of([dead(7), dead(8), *good], 2, flow, optimizer=OPTIMIZERS[1]), precision, **policy)
    twin = Engine(run_of(good, 2, flow, optimizer=OPTIMIZERS[1]), precision, **policy)
    updates = list(engine.updates())
    list(twin.updates())
    assert [update.outcome for update in updates] == ["empty", "applied"]
    assert updates[0].weight == 0
    assert not math.isinf(updates[0].grad_norm)
    assert (updates[1].attempted_updates, updates[1].applied_updates) == (2, 1)
    assert_bits(state_of(engine), state_of(twin))
    assert engine.manager.scaler.state_dict() == twin.manager.scaler.state_dict()


# --- law 11: schedules have a unit --------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("unit", "rates"), [("applied", [0.1, 0.1, 0.05, 0.05]), ("attempted", [0.1, 0.05, 0.025, 0.0125])]
)
def test_the_schedule_counts_its_own_unit(unit: str, rates: list[float], fused: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's own about the order of scheduler and optimizer among them
        engine = Engine(run_of([bad(0), batch(1), dead(2), batch(3)], 1, unit=unit), "fp32", fused=fused)
        seen = []
        for update in engine.updates():
            seen.append(update.lr)
            assert engine.scheduler is not None
            counted = update.applied_updates if unit == "applied" else update.attempted_updates
            assert engine.scheduler.state_dict()["last_epoch"] == counted
    assert seen == pytest.approx(rates)
    assert [u.outcome for u in [update]] == ["applied"]
