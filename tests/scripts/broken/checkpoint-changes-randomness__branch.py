"""Layer drop decided by a fresh random number: the recomputation saves another number of tensors, and torch refuses."""
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
np.random.seed(3)
layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


def some(x):
    for layer in layers:
        if np.random.rand() < 0.5:
            x = torch.tanh(layer(x))
    return x * x


opt = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(8):
    x = torch.randn(4, 8, requires_grad=True)
    loss = checkpoint(some, x, use_reentrant=False).mean()  # expect: checkpoint-changes-randomness
    loss.backward()
    opt.step()
    opt.zero_grad()
