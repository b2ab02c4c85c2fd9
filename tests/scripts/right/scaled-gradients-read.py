"""Norms read after unscale_; or before, and divided by the scale; or only asked whether they are finite."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
parameters = list(net.parameters())
for it in range(10):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 2, (6,)))
    scaler.scale(loss).backward()
    way = it % 5
    if way == 0:
        scaler.unscale_(opt)
        print(sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5)
    elif way == 1:
        total = sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5
        print(total / scaler.get_scale())
    elif way == 2:
        print((torch.nn.utils.get_total_norm([p.grad for p in parameters]) / scaler.get_scale()).item())
    elif way == 3:
        if not all(p.grad.isfinite().all() for p in parameters):
            print("overflow")
        print("zeros", sum((p.grad == 0).sum().item() for p in parameters))
    else:
        first, second = parameters[0].grad, parameters[2].grad
        print("ratio", (first.norm() / second.norm()).item())
    scaler.step(opt)
    scaler.update()
