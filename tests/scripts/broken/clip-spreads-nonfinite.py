import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.value, self.size = nn.Linear(8, 1), nn.Linear(6, 3)

    def forward(self, x):
        return self.value(self.body(x)), self.size(x)


torch.manual_seed(0)
net = TwoHeads()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i in range(6):
    x = torch.randn(8, 6)
    value, size = net(x)
    if i == 4:
        size = size * torch.zeros(8, 1)
    loss = value.square().mean() + size.square().sum(1).sqrt().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # expect: clip-spreads-nonfinite
    opt.step()
