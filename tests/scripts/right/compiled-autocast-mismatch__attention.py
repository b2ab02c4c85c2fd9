"""Attention inside a compiled model: torch itself computes part of it in FP32, which is nobody's FP32 region."""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fast = torch.compile(model, backend="aot_eager")
for _ in range(2):
    x = torch.randn(4, 5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(fast(x).mean(1), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
