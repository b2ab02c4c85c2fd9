"""Averages that do move: in FP32 with the same decay, and in bfloat16 with one that its spacing can follow."""
import copy

import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
slow, quick = copy.deepcopy(net), copy.deepcopy(net).bfloat16()
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
for x in torch.randn(24, 16, 6):
    opt.zero_grad()
    nn.functional.mse_loss(net(x), x.prod(1, keepdim=True)).backward()
    opt.step()
    with torch.no_grad():
        for a, b, p in zip(slow.parameters(), quick.parameters(), net.parameters()):
            a.lerp_(p, 0.001)
            b.lerp_(p.bfloat16(), 0.2)
print((quick[0].weight.float() - net[0].weight).norm().item())
