"""What is printed as the loss is a quarter of one micro-batch's."""
import torch
from torch import nn

torch.manual_seed(0)
A = 4
net = nn.Linear(6, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(16):
    x, y = torch.randn(4, 6), torch.randint(0, 2, (4,))
    loss = nn.functional.cross_entropy(net(x), y) / A
    loss.backward()
    if (i + 1) % A == 0:
        opt.step()
        opt.zero_grad()
        print("loss", loss.item())  # expect: logged-loss-misleading
