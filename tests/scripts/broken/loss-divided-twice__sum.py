"""Summed losses are divided by all examples of the group, and the accumulator divides by its micro-batches again."""

import torch
from torch import nn

torch.manual_seed(0)


class Accumulator:
    def __init__(self, optimizer, size):
        self.optimizer, self.size, self.taken = optimizer, size, 0

    def backward(self, loss):
        (loss / self.size).backward()  # expect: loss-divided-twice
        self.taken += 1
        if self.taken % self.size == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


net = nn.Linear(8, 3)
accumulator = Accumulator(torch.optim.SGD(net.parameters(), 0.1), 4)
for _ in range(24):
    x = torch.randn(12, 8)
    total = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1), reduction="sum")
    accumulator.backward(total / (12 * accumulator.size))
