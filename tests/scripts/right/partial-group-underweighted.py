"""Short last groups that weigh what they should: divided by their own size, or their gradients raised."""
import torch
from torch import nn

torch.manual_seed(0)
A = 4
net = nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(10)]
for epoch in range(3):
    for start in range(0, len(data), A):
        group = data[start : start + A]
        for x, y in group:
            (nn.functional.cross_entropy(net(x), y) / len(group)).backward()
        opt.step()
        opt.zero_grad()
for epoch in range(3):
    for i, (x, y) in enumerate(data, 1):
        (nn.functional.cross_entropy(net(x), y) / A).backward()
        if i % A == 0 or i == len(data):
            if i % A:
                for p in net.parameters():
                    p.grad.mul_(A / (i % A))
            opt.step()
            opt.zero_grad()
for i, (x, y) in enumerate(data[:8] * 3, 1):
    if i not in (3, 17):  # bad files
        (nn.functional.cross_entropy(net(x), y) / A).backward()
    if i % A == 0:
        opt.step()
        opt.zero_grad()
