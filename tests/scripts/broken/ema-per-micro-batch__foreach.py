"""List operators, a Trainer, the average in its micro-batch hook."""
import torch
from torch import nn


class Fit:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.slow = [p.detach().clone() for p in self.net.parameters()]
        self.seen = 0

    def on_batch_end(self):
        fast = [p.detach() for p in self.net.parameters()]
        torch._foreach_lerp_(self.slow, fast, 0.02)

    def run(self, batches, accumulate):
        for x in batches:
            (self.net(x).square().mean() / accumulate).backward()
            self.seen += 1
            if self.seen % accumulate == 0:
                self.opt.step()
                self.opt.zero_grad()
            self.on_batch_end()  # expect: ema-per-micro-batch


torch.manual_seed(2)
Fit().run(torch.randn(16, 6, 3), accumulate=4)
