"""The scaler refuses a closure by name."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 1)
opt = torch.optim.LBFGS(net.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)


def evaluate() -> torch.Tensor:
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.ones(4, 3)).square().mean()
    scaled = scaler.scale(loss)
    scaled.backward()
    return scaled


evaluate()
scaler.step(opt, closure=evaluate)  # expect: closure-optimizer-with-scaler
scaler.update()
