import torch
from torch import nn

torch.manual_seed(1)
net = nn.Linear(5, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.02)
for _ in range(4):
    seen = torch.rand(8, 4) > 0.4
    rate = net(torch.randn(8, 5)).abs() * seen
    ratio = torch.where(seen, 1.0 / rate, torch.zeros(()))  # expect: backward-nonfinite
    loss = ratio.clamp(max=10.0).sum() / seen.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
