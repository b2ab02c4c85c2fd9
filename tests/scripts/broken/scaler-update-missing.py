"""Two networks, one scaler: the iteration ends without update()."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
first, second = nn.Linear(3, 3), nn.Linear(3, 3)
opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
scaler = GradScaler("cpu", init_scale=64.0)
for _ in range(3):
    for opt in opts:
        opt.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = second(first(torch.randn(4, 3))).square().mean()
    scaler.scale(loss).backward()
    for opt in opts:
        scaler.unscale_(opt)
        scaler.step(opt)  # expect: scaler-update-missing
