"""Slopes of a scaled score, divided by the scale: at once, as a list, or as the square of the norm."""

import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


def slopes_at(points):
    with torch.autocast("cpu", dtype=torch.float16):
        scores = critic(points).sum()
    (slopes,) = torch.autograd.grad(scaler.scale(scores), points, create_graph=True)
    return slopes


def penalty(points, way):
    slopes = slopes_at(points)
    if way == 0:
        slopes = slopes / scaler.get_scale()
        return ((slopes.norm(2, dim=1) - 1) ** 2).mean()
    if way == 1:
        return ((slopes * (1.0 / scaler.get_scale())).norm(2, dim=1) - 1).square().mean()
    return slopes.pow(2).sum(1).mean() / scaler.get_scale() ** 2


for way in range(3):
    real, fake = torch.randn(8, 4) + 1, torch.randn(8, 4)
    points = (0.5 * real + 0.5 * fake).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = critic(fake).mean() - critic(real).mean()
    loss = loss + 10 * penalty(points, way)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()

x = torch.randn(6, 4, requires_grad=True)  # an adversary takes only the direction
with torch.autocast("cpu", dtype=torch.float16):
    loss = critic(x).mean()
(step,) = torch.autograd.grad(scaler.scale(loss), x)
worse = x + 0.1 * step.sign() + 0.1 * step / step.norm(dim=1, keepdim=True)
with torch.autocast("cpu", dtype=torch.float16):
    loss = critic(worse.detach()).mean()
opt.zero_grad()
scaler.scale(loss).backward()
scaler.step(opt)
scaler.update()
