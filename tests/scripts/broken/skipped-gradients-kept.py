"""Gradients are cleared only after updates that were applied; an overflow stays in them for ever."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for it in range(12):
    x = torch.randn(8, 4)
    if it == 6:
        x[0] = 6e4
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
        loss = (out - x[:, :1]).square().mean()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() >= before:
        opt.zero_grad()  # expect: skipped-gradients-kept
