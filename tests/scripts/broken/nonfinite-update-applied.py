"""Adam without an epsilon: a weight whose gradient is exactly zero moves by 0 / 0."""

import torch
from torch import nn

torch.manual_seed(0)
bag = nn.EmbeddingBag(12, 4)
head = nn.Linear(4, 2)
opt = torch.optim.Adam([*bag.parameters(), *head.parameters()], lr=0.01, eps=0.0)
for _ in range(6):
    words, labels = torch.randint(0, 9, (5, 3)), torch.randint(0, 2, (5,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = head(bag(words))
    loss = nn.functional.cross_entropy(out.float(), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()  # expect: nonfinite-update-applied
