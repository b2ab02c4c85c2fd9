"""Copies of the weights are optimized; a fused optimizer does not raise in step but lets update() raise."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
copies = [p.detach().clone().requires_grad_() for p in net.parameters()]
opt = torch.optim.AdamW(copies, lr=1e-3, fused=True)  # expect: scaler-sees-no-gradients
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(3, 4)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
