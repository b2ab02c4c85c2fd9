"""Histograms of magnitudes and what a dtype loses, against real casts; the scale that fits, against real scaling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.probe.micro_batch.exponents import DEFAULT_SCALE, HEADROOM, Exponents, exponents, fitting_scale

magnitudes = st.lists(
    st.one_of(
        st.floats(2.0**-40, 1e6, width=32),
        st.floats(-1e6, -(2.0**-40), width=32),
        st.sampled_from([0.0, math.inf, math.nan]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(magnitudes, st.integers(-8, 20), st.sampled_from([torch.float16, torch.bfloat16]))
def test_shares_are_those_of_a_real_cast(values: list[float], power: int, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values)
    scale = 2.0**power
    found = exponents(tensor)
    kept = tensor[torch.isfinite(tensor) & (tensor != 0)]
    assert found.kept == kept.numel()
    assert found.zeros == int((tensor == 0).sum())
    assert found.nonfinite == len(values) - found.kept - found.zeros
    if not found.kept:
        return
    cast = (kept.double() * scale).to(torch.float32).to(dtype)
    halfway = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    if not bool((kept.abs().double() * scale == halfway).any()):  # rounds to even; the bin above it does not
        assert found.lost(dtype, scale) == pytest.approx(float((cast == 0).double().mean()))
    small = kept.abs().double() * scale < torch.finfo(dtype).smallest_normal
    assert found.subnormal(dtype, scale) == pytest.approx(float(small.double().mean()))
    assert found.peak == float(kept.abs().max())


def test_counts_are_by_power_of_two() -> None:
    found = exponents(torch.tensor([1.0, 1.5, 1.999, 2.0, -0.25, 0.0, math.nan]))
    assert found.counts == {-2: 1, 0: 3, 1: 1}
    assert found + found == Exponents({-2: 2, 0: 6, 1: 2}, 2, 2, 2.0)
    assert found.beyond(torch.float16) == 0.0
    assert found.beyond(torch.float16, 2.0**15) == 0.2
    assert exponents(torch.empty(0)) == Exponents()


def test_bars_show_where_the_elements_lie() -> None:
    bars = exponents(torch.tensor([2.0**-10] * 64 + [1.0])).bars(-12, 4)
    assert len(bars) == 8
    assert bars[1] == "█"
    assert bars[6] == "▁"
    assert bars.strip(" ") == bars[1:7]
    assert exponents(torch.tensor([2.0**-30, 2.0**9])).bars(-12, 4)[::7] == "██"  # outside is shown at the ends


@pytest.mark.parametrize("largest", [1.0, 3e-4, 40000.0, 1e-9, 1e12])
def test_a_scale_leaves_its_headroom_and_no_more_than_it_says(largest: float) -> None:
    gradients = torch.tensor([largest, largest * 1e-5])
    fit = fitting_scale(exponents(gradients), torch.float16)
    assert fit is not None
    assert fit.doublings >= HEADROOM
    highest = fit.scale * 2.0**fit.doublings
    assert bool((gradients * highest).half().isfinite().all())
    assert not bool((gradients * highest * 2).half().isfinite().all())
    assert fit.lost == float(((gradients * fit.scale).half() == 0).double().mean())
    assert fit.default_overflows == (not bool((gradients * DEFAULT_SCALE).half().isfinite().all()))
    if largest == 3e-4:
        assert fit.scale == DEFAULT_SCALE  # it fits already, and loses nothing


def test_no_gradient_has_no_scale() -> None:
    assert fitting_scale(exponents(torch.zeros(4)), torch.float16) is None
