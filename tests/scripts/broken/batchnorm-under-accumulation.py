"""Statistics over 4 images, 6 times a group."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.conv = nn.Conv2d(inp, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)  # expect: batchnorm-under-accumulation

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


torch.manual_seed(0)
A = 6
net = nn.Sequential(Block(1, 4), Block(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
for i in range(12):
    images, kind = torch.randn(4, 1, 6, 6), torch.randint(0, 2, (4,))
    loss = criterion(net(images), kind) / A
    loss.backward()
    if (i + 1) % A == 0:
        opt.step()
        opt.zero_grad()
