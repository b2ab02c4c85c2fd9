"""Everything runs in float32; the scaler was left on."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # expect: scaler-without-fp16


def update(x: torch.Tensor) -> None:
    opt.zero_grad()
    grad_scaler.scale(net(x).square().mean()).backward()
    grad_scaler.step(opt)
    grad_scaler.update()


for _ in range(5):
    update(torch.randn(6, 4))
