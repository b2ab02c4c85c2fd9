"""One epoch; the rest is stepped after the loop, one micro-batch at a quarter of its weight. Scaled."""
import torch
from torch import nn


class Loop:
    group = 4

    def __init__(self):
        self.net = nn.Linear(6, 3)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)

    def micro_batch(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.net(x), y)
        loss = loss / self.group  # expect: partial-group-underweighted
        self.scaler.scale(loss).backward()

    def update(self):
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def fit(self, data):
        for n, (x, y) in enumerate(data, 1):
            self.micro_batch(x, y)
            if n % self.group == 0:
                self.update()
        if n % self.group:
            self.update()


torch.manual_seed(0)
Loop().fit([(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(9)])
