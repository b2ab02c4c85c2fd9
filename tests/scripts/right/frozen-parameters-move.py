"""The same, but gradients are dropped instead of zeroed: momentum has nothing to act on."""
import torch
from torch import nn

torch.manual_seed(1)
table, head = nn.Embedding(12, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
words, kinds = torch.randint(0, 12, (12, 16)), torch.randint(0, 3, (12, 16))

for i in range(12):
    if i == 4:
        table.weight.requires_grad = False
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(table(words[i])), kinds[i]).backward()
    optimizer.step()
print(table.weight.norm().item())
