"""train() is called once before the loop: from the second epoch on, dropout is off and batch statistics stand still."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 2))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
x = torch.randn(96, 6)
y = (x[:, 0] * x[:, 1] > 0).long()


def accuracy():
    net.eval()  # expect: evaluation-mode-kept
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


net.train()
for epoch in range(3):
    for rows in torch.randperm(96).split(24):
        opt.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        opt.step()
    print(epoch, accuracy())
