"""The head is exchanged after the optimizer was built from the old one."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 10))
for p in net[0].parameters():
    p.requires_grad_(False)
optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])  # expect: scaler-sees-no-gradients
net[2] = nn.Linear(6, 3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(5, 4)), torch.randint(0, 3, (5,)))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
