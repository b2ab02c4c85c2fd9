import torch
from torch import nn

torch.manual_seed(0)
table = torch.randn(64, 6)
table[torch.rand(64, 6) < 0.1] = float("nan")
known = torch.isfinite(table)
mean = torch.nanmean(table, 0)
table = torch.where(known, table, mean)
memory = torch.empty(64, 3)  # written before it is read
net = nn.Linear(9, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for start in range(0, 64, 16):
    rows = slice(start, start + 16)
    memory[rows] = table[rows, :3].square()
    loss = net(torch.cat([table[rows], memory[rows]], 1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
