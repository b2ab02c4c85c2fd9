"""Losses are divided, and so are the gradients before the update."""
import torch
from torch import nn

torch.manual_seed(0)
A = 4
net = nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(16):
    x, y = torch.randn(6, 6), torch.randint(0, 3, (6,))
    loss = nn.functional.cross_entropy(net(x), y) / A
    loss.backward()
    if (i + 1) % A == 0:
        for p in net.parameters():
            p.grad.div_(A)  # expect: loss-divided-twice
        opt.step()
        opt.zero_grad()
