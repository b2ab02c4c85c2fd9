"""unscale_ once a group, in the last micro-batch, the short tail included."""

import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
batches = [torch.randn(6, 5) for _ in range(8)]
for _ in range(2):
    for start in range(0, len(batches), 3):
        group = batches[start : start + 3]
        for x in group:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(net(x), x[:, :1]) / len(group)
            scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
