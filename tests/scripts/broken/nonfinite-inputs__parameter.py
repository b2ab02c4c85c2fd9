import torch
from torch import nn


class Gain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        saved = {"gain": torch.ones(width)}
        saved["gain"][1] = float("nan")  # as a checkpoint of a diverged run
        self.load_state_dict(saved)

    def forward(self, x):
        return x * self.gain  # expect: nonfinite-inputs


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), Gain(6), nn.Linear(6, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = net(torch.randn(8, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
