"""A spike detector that compares scaled maxima with a fixed number."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(5, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
spikes = 0
for _ in range(5):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 2, (6,)))
    scaler.scale(loss).backward()
    largest = torch.stack([p.grad.abs().max() for p in net.parameters()]).max()  # expect: scaled-gradients-read
    if largest > 10.0:
        spikes += 1
    scaler.step(opt)
    scaler.update()
