"""The whole model was moved to bfloat16, and the scaler stayed."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
net = net.to(device="cpu", dtype=torch.bfloat16)  # expect: half-parameters-with-scaler

opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(3):
    x, y = torch.randn(5, 4, dtype=torch.bfloat16), torch.randint(0, 2, (5,))
    loss = nn.functional.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
