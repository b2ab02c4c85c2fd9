"""Optimizers that gather inside and step now and then; gradients divided by hooks; updates inside backward."""
import torch
from torch import nn


class Gathering(torch.optim.SGD):
    def __init__(self, params, every, **options):
        super().__init__(params, **options)
        self.every, self.calls = every, 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % self.every == 0:
            super().step()
            super().zero_grad()

    def zero_grad(self, set_to_none=True):
        pass


def batch():
    return torch.randn(4, 6), torch.randint(0, 3, (4,))


torch.manual_seed(0)
criterion = nn.CrossEntropyLoss()
net = nn.Linear(6, 3)
opt = Gathering(net.parameters(), 4, lr=0.1)
for _ in range(16):
    x, y = batch()
    (criterion(net(x), y) / 4).backward()
    opt.step()
    opt.zero_grad()

net = nn.Linear(6, 3)
for p in net.parameters():
    p.register_hook(lambda grad: grad / 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(16):
    x, y = batch()
    criterion(net(x), y).backward()
    if i % 4 == 3:
        opt.step()
        opt.zero_grad()

net = nn.Linear(6, 3)
each = {p: torch.optim.Adam([p], foreach=False) for p in net.parameters()}


def at_once(p):
    each[p].step()
    each[p].zero_grad()


for p in net.parameters():
    p.register_post_accumulate_grad_hook(at_once)
for _ in range(6):
    x, y = batch()
    criterion(net(x), y).backward()
