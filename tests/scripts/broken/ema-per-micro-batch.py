"""A hand-written average, updated inside the loop over the micro-batches of a group."""
import copy

import torch
from torch import nn


class Average:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for kept, new in zip(self.model.parameters(), model.parameters()):
            kept.mul_(self.decay).add_(new, alpha=1 - self.decay)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 2))
average = Average(model, 0.95)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for group in torch.randn(8, 3, 10, 4):
    opt.zero_grad()
    for x in group:
        (nn.functional.mse_loss(model(x), x[:, :2]) / len(group)).backward()
        average.update(model)  # expect: ema-per-micro-batch
    opt.step()
print(average.model[0].bias.norm())
