import torch
from torch import nn


class Meter:
    def __init__(self, dtype):
        self.total = torch.zeros((), dtype=dtype)
        self.count = 0

    def add(self, value):
        self.total += value.detach()  # expect: low-precision-accumulator
        self.count += 1

    def mean(self):
        return self.total / self.count


torch.manual_seed(0)
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-5)
meter = Meter(torch.bfloat16)
for _ in range(320):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (net(torch.randn(8, 8)) - 2).square().mean()
    meter.add(loss)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(meter.mean().item())
