import torch
import torch.nn.functional as F
from torch import nn

# The same epsilons in float32, in bfloat16 (which holds them), and in float16 where no zero ever meets them.
torch.manual_seed(0)
net = nn.Linear(5, 8)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-8)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(4):
    x = torch.randn(6, 5)
    with torch.autocast("cpu", dtype=torch.float16):
        h = net(x)
        a = h / (h.norm(dim=-1, keepdim=True) + 1e-8)
        b = F.normalize(net(x + 1), dim=-1)
        dead = (h * 0).float().detach()
        c = dead / (dead.norm(dim=-1, keepdim=True) + 1e-8)
        d = (h.bfloat16() * 0).mean(-1) + 1e-8
        loss = (a @ b.mT).float().mean() + c.mean() + (1 / d.float()).detach().mean() * 0.0
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
