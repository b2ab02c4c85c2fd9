"""One region around the micro-batches of one group: weights change only after it."""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
PARTS = 4
for number in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = []
        for _ in range(PARTS):
            x = torch.randn(8, 6)
            losses.append(nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)) / PARTS)
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
