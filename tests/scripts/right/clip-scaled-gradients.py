"""The limit is multiplied by the scale, so that the division in step() leaves 1.0."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
for _ in range(8):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 3, (6,)))
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0 * scale) / scale
    print(norm.item())
    scaler.step(opt)
    scaler.update()
