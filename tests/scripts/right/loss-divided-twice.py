"""Two divisions, one for the group: half a square, a weighted auxiliary loss, a token count."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
opt = torch.optim.SGD(net.parameters(), lr=0.05)


def accumulate(loss_of, group, updates=4):
    for _ in range(updates):
        for _ in range(group):
            loss_of(torch.randn(4, 6), group).backward()
        opt.step()
        opt.zero_grad()


accumulate(lambda x, n: F.mse_loss(net(x), x) / 2 / n, 2)
accumulate(lambda x, n: (F.cross_entropy(net(x), x.argmax(1)) + 0.25 * F.mse_loss(net(x), x)) / n, 4)
accumulate(lambda x, n: F.cross_entropy(net(x), x.argmax(1), reduction="sum") / 4 / n, 4)
accumulate(lambda x, n: (F.smooth_l1_loss(net(x), x, reduction="none").sum(1) / 6).mean() / n, 6)
