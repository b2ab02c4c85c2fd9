"""A learning rate far too high: the weights grow until a loss overflows in float32, and what comes of it is applied."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=1e3)
for _ in range(20):
    loss = nn.functional.mse_loss(net(torch.randn(8, 6)), torch.randn(8, 3))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()  # expect: nonfinite-update-applied
