"""A head kept in FP32 inside a compiled model: its backward is compiled under the autocast around the call."""
import torch
from torch import nn


class Pooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(h.float())  # expect: compiled-autocast-mismatch


torch.manual_seed(0)
model = Pooler()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
fast = torch.compile(model, backend="aot_eager")
for _ in range(3):
    x = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(fast(x), x[:, :2])  # expect: compiled-autocast-mismatch
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
