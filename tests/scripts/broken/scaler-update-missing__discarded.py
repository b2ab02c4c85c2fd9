"""The script looks for inf itself and drops the gradients: the scale is never told, and nothing trains."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
opt = torch.optim.Adam(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
for _ in range(12):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    if not all(torch.isfinite(p.grad).all() for p in net.parameters()):
        opt.zero_grad()  # expect: scaler-update-missing
        continue
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
