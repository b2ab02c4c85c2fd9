"""Gradients cleared without an update between, on purpose: attacks, a dropped rest, a guard against bad micro-batches."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)


def batch():
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def adversarial():
    for _ in range(4):
        x, y = batch()
        worse = x.clone()
        for _ in range(2):
            worse = worse.detach().requires_grad_(True)
            loss = F.cross_entropy(net(worse), y)
            net.zero_grad()
            loss.backward()
            worse = worse + 0.1 * worse.grad.sign()
        opt.zero_grad()
        F.cross_entropy(net(worse.detach()), y).backward()
        opt.step()


def rest_dropped(group=4, length=5):
    for _ in range(3):
        opt.zero_grad()  # an epoch's rest is not used
        for i in range(length):
            x, y = batch()
            (F.cross_entropy(net(x), y) / group).backward()
            if i % group == group - 1:
                opt.step()
                opt.zero_grad()


def guarded():
    for i in range(8):
        x, y = batch()
        F.cross_entropy(net(x), y).backward()
        if i in (0, 5):
            opt.zero_grad(set_to_none=True)
            continue
        opt.step()
        opt.zero_grad(set_to_none=True)


adversarial()
rest_dropped()
guarded()
