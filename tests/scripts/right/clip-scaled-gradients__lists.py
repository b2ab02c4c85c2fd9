"""Lists of gradients divided by the scale in one call, then clipped in one; another group clamps in scaled units."""

import torch
from torch import nn


@torch.no_grad()
def limit_gradients(grads, limit):
    total = torch.stack([(g**2).sum() for g in grads]).sum().sqrt()
    torch._foreach_mul_(grads, (limit / (total + 1e-6)).clamp(max=1.0))
    return total


torch.manual_seed(3)
net = nn.Sequential(nn.Linear(5, 10), nn.SiLU(), nn.Linear(10, 2))
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
for number in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.l1_loss(net(torch.randn(7, 5)), torch.randn(7, 2))
    opt.zero_grad(set_to_none=False)
    scaler.scale(loss).backward()
    grads = [p.grad for p in net.parameters()]
    if number % 2:
        torch._foreach_mul_(grads, scaler._scale.double().reciprocal().float())
        print(limit_gradients(grads, 1.0).item())
        opt.step()
    else:
        bound = 0.5 * scaler.get_scale()
        for g in grads:
            g.clamp_(-bound, bound)
        scaler.step(opt)
        scaler.update()
