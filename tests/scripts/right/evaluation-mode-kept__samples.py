"""A generator with batch statistics draws pictures for its critic, and for us, without gradients and in training mode."""
import torch
from torch import nn

torch.manual_seed(2)
G = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh())
D = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
opt_d, opt_g = torch.optim.Adam(D.parameters(), lr=2e-4), torch.optim.Adam(G.parameters(), lr=2e-4)
fixed, pictures = torch.randn(8, 8), []
for i in range(12):
    D.zero_grad()
    with torch.no_grad():
        fake = G(torch.randn(16, 8))
    (criterion(D(torch.randn(16, 4)), torch.ones(16, 1)) + criterion(D(fake), torch.zeros(16, 1))).backward()
    opt_d.step()
    G.zero_grad()
    criterion(D(G(torch.randn(16, 8))), torch.ones(16, 1)).backward()
    opt_g.step()
    if i % 4 == 3:
        with torch.no_grad():
            pictures.append(G(fixed))
print(len(pictures))
