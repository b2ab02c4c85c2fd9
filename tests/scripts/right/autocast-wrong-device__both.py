"""Regions for every kind of device at once, and a scaler for a card that is not needed for bfloat16."""
import contextlib
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler()
for _ in range(4):
    x = torch.randn(8, 6)
    opt.zero_grad()
    with contextlib.ExitStack() as stack:
        for kind in ("cuda", "cpu"):
            stack.enter_context(torch.autocast(kind, dtype=torch.bfloat16))
        loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print(loss.item())
