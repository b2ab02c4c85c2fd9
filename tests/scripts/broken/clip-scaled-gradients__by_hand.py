"""A clipping function of the script's own, with Python numbers."""

import math

import torch
from torch import nn


def shorten(parameters: list[nn.Parameter], limit: float) -> float:
    total = math.sqrt(sum(p.grad.norm().item() ** 2 for p in parameters))
    if total > limit:
        for p in parameters:
            p.grad.mul_(limit / total)  # expect: clip-scaled-gradients
    return total


torch.manual_seed(2)
net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for _ in range(5):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(8, 6)).pow(2).mean() + 1.0
    scaler.scale(loss).backward()
    shorten(list(net.parameters()), 0.1)
    scaler.step(opt)
    scaler.update()
