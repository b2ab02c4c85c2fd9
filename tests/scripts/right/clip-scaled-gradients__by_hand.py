"""Unscaled by hand, measured and clipped by hand, stepped where everything is finite."""

import math

import torch
from torch import nn


def unscale(parameters, scaler):
    inv = 1.0 / scaler.get_scale()
    for p in parameters:
        p.grad.mul_(inv)


def shorten(parameters, limit):
    total = math.sqrt(sum(p.grad.norm().item() ** 2 for p in parameters))
    if total > limit:
        for p in parameters:
            p.grad.mul_(limit / total)
    return total


torch.manual_seed(2)
net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
parameters = list(net.parameters())
opt = torch.optim.SGD(parameters, lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for _ in range(5):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(8, 6)).pow(2).mean() + 1.0
    scaler.scale(loss).backward()
    unscale(parameters, scaler)
    if math.isfinite(shorten(parameters, 0.1)):
        opt.step()
