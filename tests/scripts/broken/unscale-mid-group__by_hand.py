"""Divided by the scale after each micro-batch, so the first ones are divided again and again."""

import torch
from torch import nn

torch.manual_seed(2)
net = nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for _ in range(4):
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(torch.randn(5, 6)), torch.randint(0, 3, (5,))) / 2
        scaler.scale(loss).backward()
        inv = 1.0 / scaler.get_scale()
        for p in net.parameters():
            p.grad.mul_(inv)  # expect: unscale-mid-group
    opt.step()
    opt.zero_grad()
