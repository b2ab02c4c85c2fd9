"""The ascent is unscaled; the scaler takes the descent for unscaled as well."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for _ in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    with torch.no_grad():
        kept = [p.clone() for p in net.parameters()]
        for p in net.parameters():
            p.add_(p.grad, alpha=0.05)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    with torch.no_grad():
        for p, old in zip(net.parameters(), kept):
            p.copy_(old)
    scaler.step(opt)  # expect: two-step-optimizer-with-scaler
    scaler.update()
    opt.zero_grad()
