"""Summed losses, so nothing tells the size but the groups themselves: 4, 4, 4, 4, and 6 at the start of an epoch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = nn.Linear(6, 3)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss(reduction="sum")
loader = DataLoader(TensorDataset(torch.randn(72, 6), torch.randint(0, 3, (72,))), batch_size=4)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = criterion(net(x), y)
        loss.backward()
        if (i + 1) % 4 == 0:  # expect: leftover-micro-batches
            opt.step()
            opt.zero_grad()
