"""The loader and its seeded generator are made anew in every epoch."""
import torch
from torch import nn
from torch.utils.data import DataLoader


def train_epoch(loader, net, opt):
    for x, y in loader:  # expect: epoch-order-repeats
        opt.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(x), y).backward()
        opt.step()


torch.manual_seed(1)
pairs = [(torch.randn(5), int(torch.randint(0, 2, ()))) for _ in range(40)]
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.Adam(net.parameters())
for epoch in range(3):
    chance = torch.Generator()
    chance.manual_seed(42)
    train_epoch(DataLoader(pairs, batch_size=10, shuffle=True, generator=chance), net, opt)
print(net[0].bias)
