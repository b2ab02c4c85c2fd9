import torch
from torch import nn

# The first scale is far too high; it settles within a dozen skips, and once more after it has grown.
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4)
for _ in range(24):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.randn(16, 8)).float().square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
