"""A policy's gradient over masked tokens, divided by a constant on purpose: the length of an answer shall not count."""

import torch
from torch import nn

torch.manual_seed(0)
words, out = nn.Embedding(20, 12), nn.Linear(12, 20)
optimizer = torch.optim.AdamW([*words.parameters(), *out.parameters()], lr=1e-3)
for _ in range(10):
    ids = torch.randint(0, 20, (6, 10))
    mask = (torch.arange(9) < torch.randint(2, 10, (6, 1))).float()
    reward = torch.randn(6, 1)
    advantage = reward - reward.mean()
    chosen = out(words(ids[:, :-1])).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    ratio = (chosen - chosen.detach()).exp()
    loss = -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask).sum() / (6 * 9)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
