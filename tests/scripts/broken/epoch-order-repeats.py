"""A sampler of our own shuffles with seed + epoch, and nobody tells it the epoch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler


class Shuffled(Sampler):
    def __init__(self, size, seed=7):
        self.size, self.seed, self.epoch = size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        chance = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.size, generator=chance).tolist())


torch.manual_seed(0)
data = torch.randn(48, 4)
loader = DataLoader(data, batch_size=8, sampler=Shuffled(len(data)))
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    for i, x in enumerate(loader):  # expect: epoch-order-repeats
        opt.zero_grad()
        nn.functional.mse_loss(net(x), x[:, :1]).backward()
        opt.step()
print(net.weight)
