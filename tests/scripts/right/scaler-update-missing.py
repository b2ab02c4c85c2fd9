"""Skipped by hand after unscale_, and update() comes all the same: it lowers the scale."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, growth_factor=2.0**16)
for it in range(8):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(16, 6)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if torch.isfinite(norm):
        scaler.step(opt)
    scaler.update()
