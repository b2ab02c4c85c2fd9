import math

import torch
from torch import nn


def time_embedding(t, width, dtype):
    freqs = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2)).to(dtype)
    angles = t.to(dtype)[:, None] * freqs[None]  # expect: positions-in-low-precision
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
opt = torch.optim.AdamW(net.parameters())
for _ in range(3):
    t = torch.randint(0, 1000, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(time_embedding(t, 8, torch.bfloat16)).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
