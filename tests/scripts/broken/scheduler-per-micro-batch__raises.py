"""The one-cycle schedule was made for the updates and is called with every micro-batch: torch raises half-way."""
import torch
from torch import nn

torch.manual_seed(2)


class Loop:
    def __init__(self, accumulate=3, groups=6):
        self.accumulate = accumulate
        self.model = nn.Linear(6, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=groups)

    def micro_batch(self, index, x):
        loss = nn.functional.cross_entropy(self.model(x), (x[:, 0] > 0).long()) / self.accumulate
        loss.backward()
        if index % self.accumulate == self.accumulate - 1:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()  # expect: scheduler-per-micro-batch


loop = Loop()
for index, x in enumerate(torch.randn(18, 10, 6)):
    loop.micro_batch(index, x)
