"""On a CPU, autocast without a dtype is bfloat16."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())
scaler = torch.amp.GradScaler("cpu")  # expect: scaler-without-fp16
for _ in range(4):
    with torch.autocast("cpu"):
        loss = net(torch.randn(6, 4)).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
