"""Modes that look kept and are meant: frozen batch statistics, a teacher, a spread sampled by dropout, statistics
renewed without gradients, a forward without dropout or norms under no_grad."""
import copy

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

torch.manual_seed(4)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
teacher = copy.deepcopy(net).eval().requires_grad_(False)
policy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
opt_policy = torch.optim.Adam(policy.parameters(), lr=1e-2)
x = torch.randn(64, 6)

for epoch in range(3):
    net.train()
    if epoch == 2:
        net[1].eval()  # its statistics are good enough
    for xb in x.split(16):
        with torch.no_grad():
            goal = teacher(xb)
        opt.zero_grad()
        nn.functional.mse_loss(net(xb), goal + xb[:, :1]).backward()
        opt.step()
    policy.eval()
    with torch.no_grad():
        act = policy(x).argmax(1)
    for _ in range(2):
        opt_policy.zero_grad()
        nn.functional.cross_entropy(policy(x), act).backward()
        opt_policy.step()

net.train()
update_bn([x[:32], x[32:]], net)
with torch.no_grad():
    spread = torch.stack([net(x) for _ in range(8)]).std(0).mean()
print(spread.item())
