"""Nesterov momentum in one kernel, and a scale that overflows at first."""

import torch
from torch import nn


def make(net: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [p]} for p in net.parameters()]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.8, nesterov=True, fused=True)  # expect: fused-momentum-after-skip


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
opt = make(net)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
for _ in range(12):
    x = torch.randn(32, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), 2 * x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
