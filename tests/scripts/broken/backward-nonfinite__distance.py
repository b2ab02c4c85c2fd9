import torch
from torch import nn

torch.manual_seed(0)
embed = nn.Embedding(10, 4)
opt = torch.optim.SGD(embed.parameters(), lr=0.1)
for _ in range(4):
    a, b = torch.randint(0, 10, (12,)), torch.randint(0, 10, (12,))
    b[3] = a[3]
    gap = embed(a) - embed(b)
    length = gap.square().sum(1) ** 0.5  # expect: backward-nonfinite
    loss = torch.relu(1 - length).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
