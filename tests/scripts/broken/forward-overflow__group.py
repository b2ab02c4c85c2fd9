import torch
from torch import nn

torch.manual_seed(0)
A = 3
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for i in range(9):
    x = torch.randn(4, 8)
    if i == 4:
        x *= 3e4
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
        loss = (out * out).mean() / A  # expect: forward-overflow
    scaler.scale(loss).backward()
    if (i + 1) % A == 0:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
