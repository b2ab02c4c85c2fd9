"""The penalty on squared slopes goes backward by itself, with the scale squared in it."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for number in range(4):
    x = torch.randn(6, 3, requires_grad=True)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
        loss = nn.functional.mse_loss(out, x.detach()[:, :1])
    scaler.scale(loss).backward(retain_graph=True)
    if number % 2 == 0:
        grads = torch.autograd.grad(  # expect: scaled-gradients-in-loss
            outputs=scaler.scale(out).sum(), inputs=x, create_graph=True
        )[0]
        r1 = grads.pow(2).sum(1).mean()
        scaler.scale(0.5 * r1).backward()
    scaler.step(opt)
    scaler.update()
