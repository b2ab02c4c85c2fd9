import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for _ in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        energy = net(torch.randn(8, 6))
    # electron volts to kelvin and back again, squared: the gradient is 1e9 without any scale
    loss = (energy.float() * 11604.5).square().sum()  # expect: backward-nonfinite
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
