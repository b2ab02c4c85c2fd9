"""The logged loss is the mean over the group, undivided and unscaled."""
import torch
from torch import nn

torch.manual_seed(0)
A = 4
net = nn.Linear(6, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
running = torch.zeros(())
for i in range(16):
    x, y = torch.randn(4, 6), torch.randint(0, 2, (4,))
    loss = nn.functional.cross_entropy(net(x), y)
    (loss / A).backward()
    running += loss.detach()
    if (i + 1) % A == 0:
        opt.step()
        opt.zero_grad()
        print("loss", running.item() / A)
        running.zero_()
