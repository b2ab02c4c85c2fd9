"""Micro-batches that supervise nothing and harm nothing."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 3)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
total, counted = 0.0, 0
for it in range(8):
    x = torch.randn(5, 6)
    y = torch.full((5,), -100) if it == 3 else torch.randint(0, 3, (5,))
    per = F.cross_entropy(net(x), y, reduction="none")
    loss = per.sum() / (y != -100).sum().clamp(min=1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item()

for it in range(8):
    x = torch.randn(5, 6)
    y = torch.full((5,), -100) if it == 3 else torch.randint(0, 3, (5,))
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()  # NaN once, with gradients that are zero
    opt.step()
    if bool((y != -100).any()):
        total, counted = total + loss.item(), counted + 1

for it in range(8):
    x = torch.randn(5, 6)
    known = torch.rand(5) < (0.0 if it == 3 else 0.7)
    if not known.any():
        continue
    loss = (net(x)[known] - x[known, :3]).square().mean() + max(0.0, (it - 4) / 4) * net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item()
