"""Skipped updates whose gradients are cleared all the same, by the scaler's loop and by a guard of one's own."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for _ in range(8):
    x = torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), x[:, :1])
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()

for it in range(8):
    x = torch.randn(8, 4)
    target = x[:, :1].clone()
    if it == 3:
        target[0] = 1e30
    nn.functional.mse_loss(net(x), target).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if torch.isfinite(norm):
        opt.step()
    opt.zero_grad()
