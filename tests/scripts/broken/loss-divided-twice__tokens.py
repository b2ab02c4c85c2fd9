"""Summed losses over the group's tokens, right already, and then divided by the number of micro-batches."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
V, A = 13, 3
net = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V))
opt = torch.optim.SGD(net.parameters(), lr=0.5)
for _ in range(5):
    group = [torch.randint(0, V, (2, length)) for length in (4, 9, 6)]
    num_items_in_batch = sum(ids[:, 1:].numel() for ids in group)
    for ids in group:
        logits = net(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / num_items_in_batch
        loss = loss / A  # expect: loss-divided-twice
        loss.backward()
    opt.step()
    opt.zero_grad()
