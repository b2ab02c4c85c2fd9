"""A scale set by hand while half of the group has been added up."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
schedule = iter([128.0, 256.0, 512.0])
for _ in range(3):
    for half in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.randn(5, 4)).abs().mean() / 2
        scaler.scale(loss).backward()
        if half == 0:
            scaler.update(next(schedule))  # expect: scaler-update-mid-group
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
