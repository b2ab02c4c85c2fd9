"""The first attempt fits; a later one overflows, when the momentum has long been written."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.8, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, growth_factor=2.0**16)
for _ in range(8):
    x = torch.randn(32, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), 2 * x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
