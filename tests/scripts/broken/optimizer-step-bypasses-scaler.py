"""The old optimizer.step() was kept when the loss was scaled."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 9), nn.ELU(), nn.Linear(9, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for _ in range(6):
    opt.zero_grad(set_to_none=True)
    x = torch.randn(6, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), x.mean(1, keepdim=True))
    scaler.scale(loss).backward()
    opt.step()  # expect: optimizer-step-bypasses-scaler
