"""Half parameters whose updates arrive: a rate that reaches their spacing, an FP32 master kept by hand, compensated
and random rounding."""
import copy

import torch
from torch import nn


class Compensated(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                lost = self.state[p].setdefault("lost", torch.zeros_like(p))
                step = lost - group["lr"] * p.grad
                before = p.clone()
                p.add_(step)
                lost.copy_(step - (p - before))


class Dithered(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                wide = (p.float() - group["lr"] * p.grad.float()).view(torch.int32)
                wide += torch.randint_like(wide, 1 << 16)
                p.copy_((wide & -65536).view(torch.float32))


torch.manual_seed(0)
x = torch.randn(16, 8)
first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
nets = [copy.deepcopy(first) for _ in range(4)]
master = [p.detach().float().requires_grad_() for p in nets[3].parameters()]
opts = [
    torch.optim.AdamW(nets[0].parameters(), lr=2e-2),
    Compensated(nets[1].parameters(), 1e-4),
    Dithered(nets[2].parameters(), 1e-4),
    torch.optim.SGD(master, lr=1e-5),
]
for _ in range(16):
    for net in nets:
        net.zero_grad()
        nn.functional.mse_loss(net(x.bfloat16()).float(), x[:, :2]).backward()
    for kept, p in zip(master, nets[3].parameters()):
        kept.grad = p.grad.float()
    for opt in opts:
        opt.step()
    with torch.no_grad():
        for kept, p in zip(master, nets[3].parameters()):
            p.copy_(kept)
print([net[0].weight.float().norm().item() for net in nets])
