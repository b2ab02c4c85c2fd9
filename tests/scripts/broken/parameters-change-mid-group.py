"""Weights are clamped through `.data` after every backward, so contributions of one group see different weights."""
import torch
from torch import nn


class Positive(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))

    def project(self):
        for p in self.parameters():
            p.data.sub_(0.01 * p.data.sign())  # expect: parameters-change-mid-group


torch.manual_seed(0)
net = Positive()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for i in range(18):
    x = torch.randn(8, 6)
    (nn.functional.l1_loss(net(x), x.abs().sum(1, keepdim=True)) / 3).backward()
    net.project()  # expect: parameters-change-mid-group
    if i % 3 == 2:
        opt.step()
        opt.zero_grad()
