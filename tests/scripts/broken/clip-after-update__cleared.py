"""A helper ends the update first; what is clipped then is nothing at all."""

import torch
from torch import nn


def finish(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


torch.manual_seed(1)
net = nn.Linear(4, 4)
opt = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for _ in range(5):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.smooth_l1_loss(net(torch.randn(6, 4)), torch.randn(6, 4))
    scaler.scale(loss).backward()
    finish(opt, scaler)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # expect: clip-after-update
