"""The norm is printed before anything is unscaled."""

import torch
from torch import nn


def gradient_norm(module: nn.Module) -> float:
    total = 0.0
    for p in module.parameters():
        if p.grad is not None:
            total += p.grad.detach().data.norm(2).item() ** 2  # expect: scaled-gradients-read
    return total**0.5


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
for it in range(5):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 2, (6,)))
    scaler.scale(loss).backward()
    print(it, gradient_norm(net))
    scaler.step(opt)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < before:
        print("skipped")
