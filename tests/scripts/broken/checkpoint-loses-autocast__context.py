"""torch's own checkpoint, told to switch autocast off while it computes again."""
import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def contexts():
    return contextlib.nullcontext(), torch.autocast("cpu", enabled=False)


torch.manual_seed(0)
layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
opt = torch.optim.Adam(layers.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = x
        for layer in layers:
            h = checkpoint(  # expect: checkpoint-loses-autocast
                lambda v, f=layer: torch.tanh(f(v.float())), h, use_reentrant=False, context_fn=contexts
            )
        loss = h.float().pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
