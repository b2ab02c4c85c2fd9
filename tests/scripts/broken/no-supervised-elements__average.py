"""Only the running average is spoiled: torch's own mean over no target gives NaN, its gradients are zero."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss(ignore_index=9)
total = torch.zeros(())
for it in range(6):
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    if it == 2:
        y.fill_(9)
    loss = criterion(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.detach()  # expect: no-supervised-elements
print(total / 6)
