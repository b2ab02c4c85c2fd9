"""Unscaled, then stepped directly: the inf that unscale_ found is applied."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**25)
for _ in range(4):
    opt.zero_grad()
    x = torch.randn(32, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), 3 * x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    opt.step()  # expect: optimizer-step-bypasses-scaler
    scaler.update()
