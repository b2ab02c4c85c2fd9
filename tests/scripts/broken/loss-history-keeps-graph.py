"""A running total of losses, each with its graph."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
running_loss = 0.0
for i in range(24):
    x = torch.randn(16, 8)
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(x), x[:, :1])
    loss.backward()
    opt.step()
    running_loss += loss  # expect: loss-history-keeps-graph
print(running_loss / 24)
