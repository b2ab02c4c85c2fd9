"""Law 7 over replicas: any split of any examples over any number of replicas is the update of one process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.replicas.cases import Shared
from tests.engine.replicas.company import Company
from tests.engine.replicas.test_exact import net
from tests.engine.replicas.twin import assert_same
from tests.engine.runs import bad, batch, dead, examples

pytestmark = pytest.mark.processes


@st.composite
def shared_runs(draw: st.DrawFn) -> Shared:
    world = draw(st.integers(1, 3))
    wrap = draw(st.sampled_from(["ddp", "ddp", "fsdp", "none"]))
    flow = draw(st.sampled_from(["ahead", "graph", "along", "masked"]))
    seed = draw(st.integers(0, 10_000))
    least = 1 if wrap == "fsdp" else 0  # a sharded model is gathered by all, in every forward
    epochs: list[list[Any]] = []
    for rank in range(world):
        kinds = draw(st.lists(st.sampled_from(["live"] * 6 + ["dead", "bad"]), min_size=least, max_size=5))
        made = []
        for k, kind in enumerate(kinds):
            own = seed + 100 * rank + k
            if kind == "live":
                made.append(batch(own, m=draw(st.integers(1, 3)), live=draw(st.sampled_from([0.4, 1.0]))))
            else:
                made.append(dead(own) if kind == "dead" else bad(own))
        epochs.append(made)
    if not any(epochs):
        epochs[0] = [batch(seed)]
    options: dict[str, Any] = {}
    if wrap == "ddp":
        options = draw(st.sampled_from([{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]))
    return Shared(
        net(seed, idle="find_unused_parameters" in options),
        epochs,
        size=draw(st.integers(1, 3)),
        flow=flow,
        wrap=wrap,
        options=options,
        policy={"replicas": "world"} if wrap == "none" else {},
        drop_last=draw(st.booleans()),
        terms=draw(st.integers(1, 2)) if flow in ("ahead", "along") and wrap != "fsdp" else 1,
        epochs=draw(st.integers(1, 2)),
    )


@given(run=shared_runs())
@examples(40)
def test_any_split(company: Company, run: Shared) -> None:
    assert_same(company, run)
