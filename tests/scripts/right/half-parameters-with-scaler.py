"""The half layer is frozen; what learns is float32."""

import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).half().requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


torch.manual_seed(0)
net = Adapted()
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for _ in range(4):
    x = torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), x)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
