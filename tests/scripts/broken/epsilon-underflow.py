import torch
from torch import nn


class UnitRows(nn.Module):
    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + self.eps)  # expect: epsilon-underflow


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8, bias=False), UnitRows(), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(4):
    x = torch.randn(6, 5)
    x[2] = 0.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), torch.randint(0, 2, (6,)))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
