"""Ragged micro-batches weighed by what they supervise; an objective that counts sentences; a loader's last batch."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

V, GROUP = 17, 4
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(V, 12), nn.Linear(12, V))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def groups(lengths, size):
    for start in range(0, len(lengths), size):
        yield [torch.randint(0, V, (2, n)) for n in lengths[start : start + size]]


for group in groups([3, 9, 5, 7, 2, 8, 6, 4, 9, 3] * 2, GROUP):
    tokens = sum(ids[:, 1:].numel() for ids in group)
    for ids in group:
        logits = model(ids[:, :-1])
        (F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()

for i in range(12):  # every sentence counts once
    ids = torch.randint(0, V, (4, 10))
    live = (torch.arange(10) < torch.randint(2, 10, (4, 1))).float()
    nll = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
    loss = ((nll * live).sum(1) / live.sum(1)).mean()
    (loss / GROUP).backward()
    if i % GROUP == GROUP - 1:
        optimizer.step()
        optimizer.zero_grad()

for i in range(12):  # a mean, and gradients put right by the tokens that were counted along
    ids = torch.randint(0, V, (2, 4 + 3 * (i % GROUP)))
    seen = ids.numel() if i % GROUP == 0 else seen + ids.numel()
    (F.cross_entropy(model(ids).transpose(1, 2), ids) * ids.numel()).backward()
    if i % GROUP == GROUP - 1:
        for p in model.parameters():
            p.grad /= seen
        optimizer.step()
        optimizer.zero_grad()

loader = DataLoader(TensorDataset(torch.randint(0, V, (59, 6))), batch_size=4)
for epoch in range(2):
    for i, (ids,) in enumerate(loader, 1):
        loss = F.cross_entropy(model(ids).transpose(1, 2), ids.roll(1, 1))
        (loss / (GROUP if i <= len(loader) // GROUP * GROUP else len(loader) % GROUP)).backward()
        if i % GROUP == 0 or i == len(loader):
            optimizer.step()
            optimizer.zero_grad()
