"""The norm is measured and the gradients are scaled to a limit by hand, one line below the update."""
import torch
from torch import nn

torch.manual_seed(2)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def fit(x, y, limit=0.1):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    total = torch.sqrt(sum(p.grad.pow(2).sum() for p in net.parameters())).item()
    if total > limit:
        for p in net.parameters():
            p.grad.mul_(limit / total)  # expect: clip-after-update


for _ in range(10):
    x = torch.randn(8, 6)
    fit(x, x[:, :3].argmax(1))
