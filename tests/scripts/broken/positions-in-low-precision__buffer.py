import torch
from torch import nn


class Decay(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("place", torch.arange(length).float())

    def forward(self, x):
        return self.mix(x) * torch.exp(-self.place / 300)[:, None]


torch.manual_seed(0)
net = Decay(2500)
net = net.half()  # expect: positions-in-low-precision
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(2):
    loss = net(torch.randn(2500, 4).half()).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
