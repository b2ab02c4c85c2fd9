"""A smoothed loss is computed from tensors and never detached: a chain through every update so far."""
import torch
from torch import nn

torch.manual_seed(2)
net = nn.Linear(6, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.02)


def main():
    smooth = None
    for step, x in enumerate(torch.randn(30, 8, 6)):
        loss = (net(x) - x.sum(1, keepdim=True)).abs().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss  # expect: loss-history-keeps-graph
    print(smooth.item())


main()
