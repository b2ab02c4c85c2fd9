"""Sum over supervised tokens, divided by the number of all labels; accumulated."""
import torch
from torch import nn

torch.manual_seed(7)
A = 2
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for i in range(8):
    ids = torch.randint(0, 20, (3, 10))
    labels = ids.clone()
    labels[:, : 2 + i % 5] = -100
    loss = criterion(model(ids).view(-1, 20), labels.view(-1)) / labels.numel()  # expect: ignored-positions-counted
    loss = loss / A
    loss.backward()
    if i % A == 1:
        optimizer.step()
        optimizer.zero_grad()
