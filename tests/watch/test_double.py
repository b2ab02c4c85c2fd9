"""An FP64 loop is watched like any other, and a run stopped early is no schedule that never finishes."""

from __future__ import annotations

import torch
from torch import nn

import halfstep


def test_a_double_model_is_judged() -> None:
    net = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with halfstep.watch() as session:
        for _ in range(3):
            net(torch.randn(8, 4, dtype=torch.float64)).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert session.findings == ()
    assert session.summary.applied == 3


def test_a_run_stopped_early_is_no_schedule_that_never_finishes() -> None:
    with halfstep.watch() as session:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)
        for _ in range(5):
            for _ in range(3):
                (net(torch.randn(8, 4)).pow(2).mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert [f.rule for f in session.findings if f.severity != "info"] == []
