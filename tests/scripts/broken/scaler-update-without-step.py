"""The loop updates the scale, and a callback of the same loop does so once more."""

import torch
from torch import nn


def after_update(scaler: torch.amp.GradScaler) -> None:
    scaler.update()  # expect: scaler-update-without-step


torch.manual_seed(0)
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
for _ in range(3):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(4, 3)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    after_update(scaler)
