"""An angle between a vector and itself: acos has no slope at one, whatever the scale."""

import torch
from torch import nn
from torch.nn import functional as F


def angle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    cosine = F.cosine_similarity(a, b, dim=-1).clamp(-1, 1)
    return cosine.acos()  # expect: loss-scale-collapse


torch.manual_seed(0)
net = nn.Linear(4, 4)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for _ in range(24):
    x = torch.randn(5, 4)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
        target = torch.cat([out[:1].detach(), x[1:].to(out.dtype)])
        loss = angle(out.float(), target.float()).mean() + out.square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
