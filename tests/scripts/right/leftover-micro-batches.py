"""Groups that run on over the end of an epoch, and groups that grow."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(7)]
taken = 0
for epoch in range(4):
    for x, y in data:
        (nn.functional.cross_entropy(net(x), y) / 4).backward()
        taken += 1
        if taken % 4 == 0:
            opt.step()
            opt.zero_grad()
for group in (1, 2, 2, 3, 5, 7, 7):
    opt.zero_grad()
    for x, y in data[:group]:
        (nn.functional.cross_entropy(net(x), y) / group).backward()
    opt.step()
