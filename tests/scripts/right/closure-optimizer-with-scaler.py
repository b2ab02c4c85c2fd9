"""LBFGS in bfloat16, and in float16 with a closure that divides the scale out itself."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(12, 3)
net = nn.Linear(3, 1)
plain = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
scaled = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)


def closure() -> torch.Tensor:
    plain.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), x.sum(1, keepdim=True))
    loss.backward()
    return loss


def dividing() -> torch.Tensor:
    scaled.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    for p in net.parameters():
        p.grad /= scaler.get_scale()
    return loss


for _ in range(2):
    plain.step(closure)
    scaled.step(dividing)
