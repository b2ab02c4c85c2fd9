"""Cleared in ways that are no zero_grad."""
import torch
from torch import nn


def by_data(net):
    for p in net.parameters():
        p.grad.data.zero_()


def removed(net):
    for p in net.parameters():
        p.grad = None


def together(net):
    torch._foreach_zero_([p.grad for p in net.parameters()])


def multiplied(net):
    for p in net.parameters():
        p.grad.mul_(0)


torch.manual_seed(0)
for clear in (by_data, removed, together, multiplied):
    net = nn.Linear(6, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        loss = nn.functional.cross_entropy(net(torch.randn(4, 6)), torch.randint(0, 3, (4,)))
        loss.backward()
        opt.step()
        clear(net)
w = torch.randn(5, 1, requires_grad=True)
for _ in range(6):
    x = torch.randn(8, 5)
    (x @ w - x[:, :1]).square().mean().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad.zero_()
