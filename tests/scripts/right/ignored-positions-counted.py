"""Masks that are right: divided by what they leave, chosen examples, weights, sums over time."""
import torch
import torch.nn.functional as F
from torch import nn

V = 13
torch.manual_seed(0)
table = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V))
net = nn.Linear(6, 3)
opt = torch.optim.SGD([*table.parameters(), *net.parameters()], lr=0.1)


def padded():
    ids = torch.randint(0, V, (4, 10))
    live = torch.arange(10) < torch.randint(2, 10, (4, 1))
    return ids, live, F.cross_entropy(table(ids).transpose(1, 2), ids, reduction="none")


def live_mean():
    _, live, nll = padded()
    return (nll * live).sum() / live.sum()


def over_time():
    _, live, nll = padded()
    return (nll * live).sum(1).mean()


def ignored():
    ids, live, _ = padded()
    return F.cross_entropy(table(ids).flatten(0, 1), ids.masked_fill(~live, -100).flatten(), ignore_index=-100)


def confident():
    x = torch.randn(24, 6)
    with torch.no_grad():
        sure, label = net(x).softmax(1).max(1)
    return (F.cross_entropy(net(x + 0.1), label, reduction="none") * (sure > 0.6)).mean()


def hardest():
    _, _, nll = padded()
    return nll.flatten().topk(12)[0].mean()


def weighted():
    x = torch.randn(8, 6)
    weight = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 0.5])
    return (F.mse_loss(net(x), x[:, :3], reduction="none").mean(1) * weight).mean()


for loss_of in (live_mean, over_time, ignored, confident, hardest, weighted):
    for _ in range(5):
        opt.zero_grad()
        loss_of().backward()
        opt.step()
