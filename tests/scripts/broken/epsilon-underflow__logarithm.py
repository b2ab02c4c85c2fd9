import torch
from torch import nn

EPS = 1e-9
torch.manual_seed(0)
net = nn.Linear(6, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        share = net(torch.randn(16, 6)).relu()
        share = share / 4
        entropy = -(share * torch.log(share + EPS)).sum(-1)  # expect: epsilon-underflow
        loss = entropy.float().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
