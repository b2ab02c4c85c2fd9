"""Every micro-batch is followed by a clip of what has gathered so far."""

import torch
from torch import nn

torch.manual_seed(0)
A = 4
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
opt.zero_grad()
for i in range(5 * A):
    x = torch.randn(5, 6)
    loss = nn.functional.cross_entropy(3 * net(x), (x[:, 0] > 0).long()) / A
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)  # expect: clip-mid-group
    if (i + 1) % A == 0:
        opt.step()
        opt.zero_grad()
