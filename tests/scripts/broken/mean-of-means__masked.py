"""Reconstruction of masked points only, their number drawn at random; boolean indexing, scaled gradients divided by hand."""
import torch
from torch import nn

torch.manual_seed(6)
GROUP = 4
net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 10))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for update in range(6):
    for share in (0.1, 0.8, 0.3, 0.5):
        points = torch.randn(8, 10)
        hidden = torch.rand(8, 10) < share
        guess = net(points * ~hidden)
        loss = (guess - points)[hidden].abs().mean()  # expect: mean-of-means
        loss.backward()
    for p in net.parameters():
        p.grad.div_(GROUP)
    opt.step()
    opt.zero_grad()
