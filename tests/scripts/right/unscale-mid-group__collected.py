"""Each micro-batch is unscaled into a sum of its own, and the gradients start empty every time."""

import torch
from torch import nn

torch.manual_seed(2)
net = nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for _ in range(4):
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(torch.randn(5, 6)), torch.randint(0, 3, (5,))) / 2
        scaler.scale(loss).backward()
        for total, p in zip(sums, net.parameters()):
            total += p.grad / scaler.get_scale()
            p.grad = None
    for total, p in zip(sums, net.parameters()):
        p.grad = total
    opt.step()
    opt.zero_grad()
