"""A list of indices is shuffled by a generator of its own, made anew with the same seed for each epoch."""

import random

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
examples = torch.randn(48, 6)


def batches(seed=3, size=8):
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)  # expect: epoch-order-repeats
    for start in range(0, len(order), size):
        yield examples[order[start : start + size]]


for _ in range(3):
    for x in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
