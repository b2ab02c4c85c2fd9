"""A scale that starts far too high and settles, and overflows once each time it grows."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=4)
for _ in range(44):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), 9 * x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print(scaler.get_scale())
