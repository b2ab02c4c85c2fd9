"""unscale_ in a helper that every micro-batch goes through; torch raises at the second."""

import torch
from torch import nn


class Loop:
    def __init__(self) -> None:
        self.net = nn.Linear(4, 2)
        self.opt = torch.optim.Adam(self.net.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

    def micro_batch(self, x: torch.Tensor, last: bool) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.net(x).square().mean() / 2
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)  # expect: unscale-mid-group
        if last:
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()


torch.manual_seed(0)
loop = Loop()
for number in range(6):
    loop.micro_batch(torch.randn(3, 4), last=number % 2 == 1)
