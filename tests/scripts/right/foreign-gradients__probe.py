"""Probes in evaluation mode whose gradients never reach an update; a model tuned in evaluation mode throughout."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for it in range(8):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    if it % 4 == 2:
        net.eval()
        probe = x.clone().requires_grad_(True)
        net(probe).max(1).values.sum().backward()
        net.train()
    opt.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    opt.step()
    if it % 4 == 3:
        net.eval()
        probe = x.clone().requires_grad_(True)
        torch.autograd.grad(net(probe).sum(), probe)
        net.train()
