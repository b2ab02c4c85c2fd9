"""Stepped directly, but unscaled before and only where unscale_ found every value finite."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 9), nn.ELU(), nn.Linear(9, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for _ in range(10):
    opt.zero_grad(set_to_none=True)
    x = torch.randn(6, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), x.mean(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    if all(p.grad.isfinite().all() for p in net.parameters()):
        opt.step()
    scaler.update()
