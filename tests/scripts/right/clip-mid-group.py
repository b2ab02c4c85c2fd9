"""Clipped inside the branch that steps; an auxiliary loss is bounded by itself before the main one is added."""

import torch
from torch import nn

torch.manual_seed(0)
A = 4
net, aux = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)), nn.Linear(6, 1)
opt = torch.optim.SGD([*net.parameters(), *aux.parameters()], lr=0.1, momentum=0.9)
opt.zero_grad()
for i in range(4 * A):
    x = torch.randn(5, 6)
    (nn.functional.cross_entropy(3 * net(x), (x[:, 0] > 0).long()) / A).backward()
    if (i + 1) % A == 0:
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        opt.step()
        opt.zero_grad()
