"""Fine-tuning a loaded network with all of it in evaluation mode: dropout off and statistics frozen on purpose."""
import io

import torch
from torch import nn


def network():
    return nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 2))


torch.manual_seed(5)
first = network()
for _ in range(3):
    first(torch.randn(32, 5) * 2 + 1)
file = io.BytesIO()
torch.save(first.state_dict(), file)
file.seek(0)

net = network()
net.load_state_dict(torch.load(file))
net.eval()
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(16, 5)
    opt.zero_grad()
    nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
    opt.step()
print(net[1].running_mean.mean().item())
