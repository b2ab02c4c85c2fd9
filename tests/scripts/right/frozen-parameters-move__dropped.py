"""A layer held still by dropping its gradient before each update; another, without decay or momentum, by zeroing it."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
opt_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
for i in range(10):
    x = torch.randn(16, 6)
    y = (x[:, 0] > 0).long()
    opt.zero_grad()
    opt_plain.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    nn.functional.cross_entropy(plain(x), y).backward()
    for p in net[0].parameters():
        p.grad = None
    for p in plain[0].parameters():
        p.grad.zero_()
    opt.step()
    opt_plain.step()
print(net[0].weight.norm().item(), plain[0].weight.norm().item())
