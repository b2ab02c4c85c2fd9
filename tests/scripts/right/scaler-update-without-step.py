"""update() with a scale given by hand, and update() after an unscale_ whose step the script left out."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
for number in range(6):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(4, 3)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    if number != 3:
        scaler.step(opt)
    scaler.update()
    if number == 4:
        scaler.update(new_scale=64.0)
