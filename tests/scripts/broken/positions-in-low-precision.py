import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width), persistent=False)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device).type_as(self.inverse)
        angles = places[:, None] @ self.inverse[None]  # expect: positions-in-low-precision
        a, b = self.project(x).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


torch.manual_seed(0)
net = Rotary(8)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(torch.randn(1, 400, 8)).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
