"""The slow, obviously right twin: one process, FP64, all micro-batches of all replicas in one group."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from tests.engine.replicas.cases import Shared
from tests.engine.replicas.company import Company
from tests.engine.runs import elements, off

from halfstep.engine.reference import SGD, Reference

TOLERANCE = {"fp64": 1e-11, "fp32": 2e-5}


def groups(run: Shared) -> list[list[list[Any]]]:
    """For each update, the micro-batches of every replica."""
    longest = max(map(len, run.data))
    cut = [[epoch[k : k + run.size] for epoch in run.data] for k in range(0, longest, run.size)]
    if run.drop_last:
        cut = [group for group in cut if all(len(own) == run.size for own in group)]
    return cut


def expected(run: Shared) -> tuple[list[Any], list[list[torch.Tensor]]]:
    net = copy.deepcopy(run.net).double()
    reference = Reference([SGD(list(net.parameters()), lr=run.lr)], max_norm=run.policy.get("max_norm", 1.0))
    updates, parameters = [], []
    for _ in range(run.epochs):
        for group in groups(run):
            batches = [batch for own in group for batch in own]
            updates.append(reference.update([lambda b=b: elements(net, b, run.terms) for b in batches]))  # type: ignore[misc]
            parameters.append([p.detach().clone() for p in net.parameters()])
    return updates, parameters


def assert_same(company: Company, run: Shared, *, tolerance: float | None = None) -> list[dict[str, Any]]:
    """Train on as many replicas as there are epochs of data, and hold every update against the twin."""
    results: list[dict[str, Any]] = company.run("train", len(run.data), run=run)
    updates, parameters = expected(run)
    double = next(run.net.parameters()).dtype == torch.float64
    bound = tolerance or TOLERANCE["fp64" if double else "fp32"]
    for rank, result in enumerate(results):
        assert [row["outcome"] for row in result["rows"]] == [update.outcome for update in updates], rank
        for number, (row, twin) in enumerate(zip(result["rows"], updates, strict=True)):
            where = f"rank {rank}, update {number + 1}: {row} {twin}"
            assert row["weights"] is None or row["weight"] == twin.weight, where
            if twin.outcome == "applied":
                near = 20 * bound if tolerance is None else bound
                assert math.isclose(row["grad_norm"], twin.grad_norm, rel_tol=near, abs_tol=near), where
            ours, theirs = result["parameters"][number], parameters[number]
            moved = 20 * bound if tolerance is None else bound * run.lr * (number + 1)  # updates are clipped to 1
            assert off([p.double() for p in ours], list(theirs)) <= moved, where
        # every replica holds the same parameters, bit for bit
        for ours, first in zip(result["parameters"], results[0]["parameters"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, first, strict=True))
    for number, twin in enumerate(updates):
        if twin.outcome == "applied" and run.flow != "plain":
            total = sum(result["rows"][number]["loss"] for result in results)
            assert math.isclose(total, twin.loss, rel_tol=max(1e-4, bound), abs_tol=1e-5)
    return results
