"""update() outside the branch that steps: torch raises at the first micro-batch of a group."""

import torch
from torch import nn

torch.manual_seed(0)
ACCUMULATE = 4
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for i in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(5, 4)), torch.randint(0, 2, (5,)))
        loss = loss / ACCUMULATE
    scaler.scale(loss).backward()
    if (i + 1) % ACCUMULATE == 0:
        scaler.step(opt)
        opt.zero_grad()
    scaler.update()  # expect: scaler-update-mid-group
