"""A helper divides, and so does the loop that calls it."""
import torch
from torch import nn


class Accumulator:
    def __init__(self, optimizer, size):
        self.optimizer, self.size, self.count = optimizer, size, 0

    def backward(self, loss):
        (loss / self.size).backward()
        self.count += 1
        if self.count == self.size:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.count = 0


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 11), nn.ELU(), nn.Linear(11, 4))
accumulator = Accumulator(torch.optim.AdamW(net.parameters(), lr=1e-2), 4)
for _ in range(16):
    x, y = torch.randn(6, 5), torch.randint(0, 4, (6,))
    loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
    loss = loss / 4  # expect: loss-divided-twice
    accumulator.backward(loss)
