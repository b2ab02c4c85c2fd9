"""A cosine with warm-up, bound with functools.partial to the micro-batches of the run; calls come per epoch."""
import functools
import math

import torch
from torch import nn


def factor(current, *, num_warmup_steps, num_training_steps):
    if current < num_warmup_steps:
        return current / max(1, num_warmup_steps)
    progress = (current - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def get_schedule(optimizer, warm, total):
    bound = functools.partial(factor, num_warmup_steps=warm, num_training_steps=total)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, bound)  # expect: schedule-never-finishes


torch.manual_seed(4)
net = nn.Linear(5, 1)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
EPOCHS, BATCHES = 4, 9
schedule = get_schedule(opt, 1, EPOCHS * BATCHES)
for epoch in range(EPOCHS):
    for x in torch.randn(BATCHES, 12, 5):
        opt.zero_grad()
        nn.functional.mse_loss(net(x), x[:, :1]).backward()
        opt.step()
    schedule.step()
print(schedule.get_last_lr())
