"""bfloat16, no scaler, no guard: a division by a count of zero reaches the weights."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(5, 5)
scale = nn.Parameter(torch.ones(()))
opt = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
for it in range(8):
    x = torch.randn(6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
    loss = (out.float() * scale - x).square().mean() + scale.log()
    opt.zero_grad()
    loss.backward()
    if it == 5:
        net.weight.grad[0] /= (x > 9).sum()  # rows weighted by how many values are large: there is none
    opt.step()  # expect: nonfinite-update-applied
