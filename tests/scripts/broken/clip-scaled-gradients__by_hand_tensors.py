"""A clipping function of the script's own that never leaves the device."""

import torch
from torch import nn


@torch.no_grad()
def limit_gradients(module: nn.Module, limit: float) -> torch.Tensor:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    total = torch.stack([(g.detach() ** 2).sum() for g in grads]).sum().sqrt()
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)  # expect: clip-scaled-gradients
    return total


torch.manual_seed(3)
net = nn.Sequential(nn.Linear(5, 10), nn.SiLU(), nn.Linear(10, 2))
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
for _ in range(5):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.l1_loss(net(torch.randn(7, 5)), torch.randn(7, 2))
    opt.zero_grad(set_to_none=False)
    scaler.scale(loss).backward()
    limit_gradients(net, 1.0)
    scaler.step(opt)
    scaler.update()
