"""Hooks put zeros together where the pretrained rows are, and hand back nothing else: decoupled decay shrinks them."""

import torch
from torch import nn

torch.manual_seed(4)
PRETRAINED = 12
words, out = nn.Embedding(20, 8), nn.Linear(8, 4)
opt = torch.optim.AdamW([words.weight, out.weight, out.bias], lr=1e-2, weight_decay=0.1)


def only_new(grad):
    return torch.cat([torch.zeros_like(grad[:PRETRAINED]), grad[PRETRAINED:]])


words.weight.register_hook(only_new)  # expect: frozen-parameters-move
for _ in range(10):
    ids = torch.randint(0, 20, (32,))
    opt.zero_grad()
    nn.functional.cross_entropy(out(words(ids)), ids % 4).backward()
    opt.step()
print(words.weight[:PRETRAINED].norm().item())
