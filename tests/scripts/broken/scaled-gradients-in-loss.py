"""A critic's gradient penalty that wants scaled norms near one."""

import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


def penalty(real, fake):
    mix = torch.rand(len(real), 1)
    points = (mix * real + (1 - mix) * fake).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        scores = critic(points).sum()
    (slopes,) = torch.autograd.grad(scaler.scale(scores), points, create_graph=True)  # expect: scaled-gradients-in-loss
    return ((slopes.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


for _ in range(3):
    real, fake = torch.randn(8, 4) + 1, torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = critic(fake).mean() - critic(real).mean()
    loss = loss + 10 * penalty(real, fake)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
