"""Warm-up in float32 under the same scaler, then float16; and a half model whose FP32 masters are stepped."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for number in range(6):
    with torch.autocast("cpu", dtype=torch.float16, enabled=number >= 3):
        loss = net(torch.randn(6, 4)).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()

half = nn.Linear(4, 2).half()
masters = [p.detach().float().requires_grad_() for p in half.parameters()]
opt = torch.optim.SGD(masters, lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(4):
    half.zero_grad()
    loss = half(torch.randn(5, 4).half()).float().square().mean()
    scaler.scale(loss).backward()
    for master, p in zip(masters, half.parameters()):
        master.grad = p.grad.float()
    scaler.step(opt)
    scaler.update()
    with torch.no_grad():
        for master, p in zip(masters, half.parameters()):
            p.copy_(master)
