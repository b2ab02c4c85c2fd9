"""Gradients are cleared once a group, yet every micro-batch steps on the unfinished sum."""
import torch
from torch import nn

torch.manual_seed(1)
EVERY = 4
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(24):
    x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))
    (nn.functional.cross_entropy(net(x), y) / EVERY).backward()
    opt.step()  # expect: optimizer-step-every-micro-batch
    if (i + 1) % EVERY == 0:
        opt.zero_grad(set_to_none=True)
