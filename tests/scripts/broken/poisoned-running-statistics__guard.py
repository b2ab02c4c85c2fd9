import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.Adam(net.parameters())
for i in range(8):
    x = torch.randn(16, 6)
    y = (x[:, 0] > 0).long()
    if i == 3:
        x[2, 1] = float("inf")
    loss = nn.functional.cross_entropy(net(x), y)  # expect: poisoned-running-statistics
    if not torch.isfinite(loss):
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
net.eval()
print(net(torch.randn(3, 6)))
