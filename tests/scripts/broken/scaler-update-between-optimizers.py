"""Encoder and decoder learn from one loss; each step is followed by an update of its own."""

import torch
from torch import nn

torch.manual_seed(0)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x).relu())


parts = Parts()
a, b = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (parts.encoder, parts.decoder))
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
for _ in range(5):
    x = torch.randn(7, 6)
    parts.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(parts(x), x)
    scaler.scale(loss).backward()
    scaler.step(a)
    scaler.update()  # expect: scaler-update-between-optimizers

    scaler.step(b)
    scaler.update()
