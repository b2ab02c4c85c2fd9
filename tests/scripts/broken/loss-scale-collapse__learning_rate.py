"""The learning rate makes the weights grow until activations leave the range of float16."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=2.0)  # expect: loss-scale-collapse
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(36):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), 4 * x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
