"""Cleared between backward and the update: the optimizer never sees a gradient."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(5, 2)
opt = torch.optim.Adam(net.parameters(), lr=0.1)
for _ in range(6):
    x = torch.randn(8, 5)
    loss = nn.functional.mse_loss(net(x), x[:, :2])
    loss.backward()
    opt.zero_grad()  # expect: zero-grad-mid-group
    opt.step()
