"""Parameters changed by hand between backwards: an ascent and back, after the update, swapped for evaluation."""
import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
average = copy.deepcopy(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def both(x, y, divide=1):
    (F.cross_entropy(net(x), y) / divide).backward()


def batch():
    return torch.randn(8, 5), torch.randint(0, 3, (8,))


for _ in range(5):
    x, y = batch()
    both(x, y)
    with torch.no_grad():
        norm = torch.sqrt(sum(p.grad.square().sum() for p in net.parameters()))
        steps = [0.05 * p.grad / norm for p in net.parameters()]
        torch._foreach_add_(list(net.parameters()), steps)
    opt.zero_grad()
    both(x, y)
    with torch.no_grad():
        torch._foreach_sub_(list(net.parameters()), steps)
    opt.step()
    opt.zero_grad()

for i in range(12):
    both(*batch(), divide=3)
    if i % 3 == 2:
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, a in zip(net.parameters(), average.parameters()):
                p.clamp_(-2, 2)
                a.lerp_(p, 0.1)
        kept = copy.deepcopy(net.state_dict())
        net.load_state_dict(average.state_dict())
        with torch.no_grad():
            net(batch()[0])
        net.load_state_dict(kept)
