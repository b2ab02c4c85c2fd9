"""Each half unscales, and update() comes only at the end: the second unscale_ raises."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)


def backward(x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()


for _ in range(3):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    backward(x, y)
    scaler.unscale_(opt)
    shift = [0.05 * p.grad / p.grad.norm() for p in net.parameters()]
    with torch.no_grad():
        for p, s in zip(net.parameters(), shift):
            p.add_(s)
    opt.zero_grad()
    backward(x, y)
    with torch.no_grad():
        for p, s in zip(net.parameters(), shift):
            p.sub_(s)
    scaler.unscale_(opt)  # expect: two-step-optimizer-with-scaler
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
