"""Reentrant checkpointing that saves the time to keep the random state, around blocks with dropout."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


def block(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))


torch.manual_seed(0)
stem, body, head = nn.Linear(5, 20), nn.Sequential(*(block(20) for _ in range(4))), nn.Linear(20, 2)
optimizer = torch.optim.Adam([p for m in (stem, body, head) for p in m.parameters()], lr=1e-3)
for _ in range(4):
    x = torch.randn(24, 5)
    optimizer.zero_grad()
    h = stem(x)
    h = checkpoint_sequential(body, 2, h, use_reentrant=True, preserve_rng_state=False)  # expect: checkpoint-changes-randomness
    loss = nn.functional.cross_entropy(head(h), (x[:, 0] > 0).long())
    loss.backward()
    optimizer.step()
print(loss.item())
