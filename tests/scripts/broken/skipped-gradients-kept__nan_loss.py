"""A NaN loss is noticed only after its backward; the loop goes on without clearing."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for i in range(10):
    x = torch.randn(6, 6)
    want = (x[:, :1] - 2.0).log() if i == 4 else x[:, :1]
    loss = nn.functional.mse_loss(net(x), want)
    loss.backward()
    if torch.isnan(loss):  # expect: skipped-gradients-kept
        continue
    opt.step()
    opt.zero_grad()
