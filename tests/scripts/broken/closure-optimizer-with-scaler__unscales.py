"""The closure unscales, and LBFGS calls it a second time."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 1)
x = torch.randn(12, 3)
opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)


def closure() -> torch.Tensor:
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)  # expect: closure-optimizer-with-scaler
    return loss


opt.step(closure)
scaler.update()
