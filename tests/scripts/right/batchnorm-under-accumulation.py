"""Batch statistics that no group is split over: frozen, of other kinds, of real and fake on their own."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
A = 3


def accumulate(net):
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for i in range(2 * A):
        x = torch.randn(4, 6)
        (F.cross_entropy(net(x), x.argmax(1)) / A).backward()
        if i % A == A - 1:
            opt.step()
            opt.zero_grad()


frozen = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
frozen[1].eval().requires_grad_(False)
accumulate(frozen)
accumulate(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 6)))
accumulate(nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(8, 6)))

G = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
D = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
opt_g, opt_d = torch.optim.Adam(G.parameters(), lr=2e-4), torch.optim.Adam(D.parameters(), lr=2e-4)
criterion = nn.BCEWithLogitsLoss()
for _ in range(4):
    D.zero_grad()
    criterion(D(torch.randn(8, 2)), torch.ones(8, 1)).backward()
    fake = G(torch.randn(8, 3))
    criterion(D(fake.detach()), torch.zeros(8, 1)).backward()
    opt_d.step()
    G.zero_grad()
    criterion(D(fake), torch.ones(8, 1)).backward()
    opt_g.step()
