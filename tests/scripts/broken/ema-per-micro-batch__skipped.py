"""The average moves after every attempt, also after the ones that the scaler skipped."""
import torch
from torch import nn

torch.manual_seed(1)
net = nn.Linear(6, 3)
shadow = [p.detach().clone() for p in net.parameters()]
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for it in range(10):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (net(x).float() - x[:, :3]).square().sum(1).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    shadow = [0.99 * s + 0.01 * p.detach() for s, p in zip(shadow, net.parameters())]  # expect: ema-per-micro-batch
print(shadow[1])
