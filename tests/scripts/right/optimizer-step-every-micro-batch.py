"""Divided losses, one update each, and no group meant: half a square, a mean over directions, heads, a batch of sums."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
opt = torch.optim.AdamW(layers.parameters(), lr=1e-2)


def update(loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


for _ in range(5):
    x = torch.randn(8, 6)
    y = x.argmax(1)
    update(F.mse_loss(layers[0](x), x) / 2)
    a, b = F.normalize(layers[0](x), dim=1), F.normalize(layers[1](x), dim=1)
    scores = 5 * a @ b.T
    update((F.cross_entropy(scores, torch.arange(8)) + F.cross_entropy(scores.T, torch.arange(8))) / 2)
    hidden, total = x, 0.0
    for layer in layers:
        hidden = torch.tanh(layer(hidden))
        total = total + F.cross_entropy(hidden, y)
    update(total / len(layers))
    update(F.cross_entropy(layers[2](x), y, reduction="sum") / len(x))
    update(0.1 * F.smooth_l1_loss(layers[3](x), x))
