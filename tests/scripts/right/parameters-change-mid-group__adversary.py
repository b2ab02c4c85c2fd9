"""Adversarial training: embeddings move against the loss for a second backward, and are put back before the update."""

import torch
import torch.nn.functional as F
from torch import nn


class Adversary:
    def __init__(self, weight):
        self.weight, self.kept = weight, None

    def attack(self, size=0.5):
        self.kept = self.weight.data.clone()
        self.weight.data.add_(size * self.weight.grad / (self.weight.grad.norm() + 1e-12))

    def restore(self):
        self.weight.data = self.kept


torch.manual_seed(0)
words, out = nn.Embedding(20, 8), nn.Linear(8, 3)
optimizer = torch.optim.AdamW([*words.parameters(), *out.parameters()], lr=1e-3)
adversary = Adversary(words.weight)
for number in range(12):
    ids, target = torch.randint(0, 20, (8, 5)), torch.randint(0, 3, (8,))
    (F.cross_entropy(out(words(ids).mean(1)), target) / 2).backward()
    adversary.attack()
    (F.cross_entropy(out(words(ids).mean(1)), target) / 2).backward()
    adversary.restore()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
