import copy

import torch
from torch import nn

# Glitches are clamped; a batch that is dropped puts the buffers back; group norm keeps none.
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.Linear(8, 2))
opt = torch.optim.Adam(net.parameters())
for i in range(8):
    x = torch.randn(16, 6)
    y = (x[:, 0] > 0).long()
    if i == 2:
        x[1] *= 1e30
    if i == 3:
        x[2, 1] = float("inf")
    x = x.clamp(-6, 6)
    if i == 5:
        x[0, 0] = float("nan")
    before = copy.deepcopy([b.clone() for b in net.buffers()])
    loss = nn.functional.cross_entropy(net(x), y)
    if not torch.isfinite(loss):
        with torch.no_grad():
            for b, old in zip(net.buffers(), before):
                b.copy_(old)
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
net.eval()
print(net(torch.randn(3, 6)))
