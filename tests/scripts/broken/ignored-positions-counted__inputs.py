"""Sequences of many lengths: prediction and target are masked before the loss, which averages over the padding too."""

import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(4, 12, batch_first=True), nn.Linear(12, 1)
        self.criterion = nn.MSELoss()

    def forward(self, x, y, mask):
        p = self.head(self.recurrent(x)[0]).squeeze(-1)
        return self.criterion(p * mask, y * mask)  # expect: ignored-positions-counted


torch.manual_seed(0)
model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(10):
    lengths = torch.randint(3, 13, (8, 1))
    mask = (torch.arange(12) < lengths).float()
    x = torch.randn(8, 12, 4) * mask[..., None]
    optimizer.zero_grad()
    model(x, x.sum(-1), mask).backward()
    optimizer.step()
