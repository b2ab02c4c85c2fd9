"""Cleared by `p.grad = None`, losses not divided: the update sees the last micro-batch only."""
import torch
from torch import nn

torch.manual_seed(0)
GROUP = 3
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(12)]

for i, (x, y) in enumerate(data):
    for p in model.parameters():
        p.grad = None  # expect: zero-grad-mid-group
    prediction = model(x)
    error = prediction - y
    loss = error.square().mean()
    loss.backward()
    if i % GROUP == GROUP - 1:
        optimizer.step()
