"""update() each time keeps torch from raising, and the sum is of two magnitudes."""

import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
GROUP = 3
for number in range(12):
    x = torch.randn(6, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), x[:, :1]) / GROUP
    scaler.scale(loss).backward()
    scaler.unscale_(opt)  # expect: unscale-mid-group
    norm = nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    if number % GROUP == GROUP - 1:
        scaler.step(opt)
        opt.zero_grad()
    scaler.update()
