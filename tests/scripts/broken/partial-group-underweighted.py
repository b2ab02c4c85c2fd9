"""The last group of an epoch is shorter, its losses are divided by the full number all the same."""
import torch
from torch import nn

torch.manual_seed(4)
ACCUMULATE = 4
net = nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
micro_batches = [(torch.randn(8, 10), torch.randn(8, 1)) for _ in range(10)]
for epoch in range(3):
    for index, (x, y) in enumerate(micro_batches):
        loss = nn.functional.mse_loss(net(x), y)
        (loss / ACCUMULATE).backward()  # expect: partial-group-underweighted
        if (index + 1) % ACCUMULATE == 0 or index + 1 == len(micro_batches):
            optimizer.step()
            optimizer.zero_grad()
