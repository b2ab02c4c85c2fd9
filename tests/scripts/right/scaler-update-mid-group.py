"""Two optimizers with groups of two sizes, each with a scaler of its own."""

import torch
from torch import nn

torch.manual_seed(0)
gen, critic = nn.Linear(3, 2), nn.Linear(2, 1)
g_opt, c_opt = torch.optim.Adam(gen.parameters()), torch.optim.Adam(critic.parameters())
g_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
c_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for number in range(1, 13):
    real, noise = torch.randn(4, 2), torch.randn(4, 3)
    c_opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        c_loss = critic(gen(noise).detach()).mean() - critic(real).mean()
    c_scaler.scale(c_loss).backward()
    c_scaler.step(c_opt)
    c_scaler.update()
    if number % 3 == 0:
        g_opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            g_loss = -critic(gen(noise)).mean()
        g_scaler.scale(g_loss).backward()
        g_scaler.step(g_opt)
        g_scaler.update()
