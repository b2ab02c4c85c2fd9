"""A loss scale without a scaler: a constant, multiplied in and divided out by hand."""

import torch
from torch import nn

torch.manual_seed(0)
SCALE = 2.0**14
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.5)
for _ in range(4):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(torch.randn(64, 6))
    loss = nn.functional.mse_loss(out.float(), torch.randn(64, 4)) * 1e-2
    (loss * SCALE).backward()
    for p in net.parameters():
        p.grad.div_(SCALE)
    opt.step()
