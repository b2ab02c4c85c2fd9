"""A micro-batch in which nothing was labelled, divided by the number of labels: NaN, in the whole group's gradient."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
labelled = [5, 3, 0, 4, 2, 6, 1, 4]
for i, count in enumerate(labelled):
    x, y = torch.randn(8, 6), torch.randn(8)
    known = torch.arange(8) < count
    error = (net(x).squeeze(1) - y) ** 2
    loss = (error * known).sum() / known.sum()  # expect: no-supervised-elements
    (loss / 2).backward()
    if i % 2:
        opt.step()
        opt.zero_grad()
