"""The discriminator's loss also runs into the generator, whose gradients were cleared before it."""
import torch
from torch import nn


def update(optimizer, loss):
    loss.backward()
    optimizer.step()


torch.manual_seed(0)
G, D = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1))
opt_g, opt_d = torch.optim.RMSprop(G.parameters(), 1e-3), torch.optim.RMSprop(D.parameters(), 1e-3)
for _ in range(10):
    opt_d.zero_grad()
    opt_g.zero_grad()  # expect: foreign-gradients
    real, z = torch.randn(16, 2) + 1, torch.randn(16, 2)
    update(opt_d, D(G(z)).mean() - D(real).mean())
    update(opt_g, -D(G(z)).mean())
