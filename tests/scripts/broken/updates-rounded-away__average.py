"""The average of the weights is a bfloat16 copy with a decay of 0.999: it stays where it began."""
import copy

import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
average = copy.deepcopy(net).bfloat16()  # expect: updates-rounded-away
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
for x in torch.randn(24, 16, 6):
    opt.zero_grad()
    nn.functional.mse_loss(net(x), x.prod(1, keepdim=True)).backward()
    opt.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), net.parameters()):
            slow.mul_(0.999).add_(fast, alpha=0.001)
print((average[0].weight.float() - net[0].weight).norm().item())
