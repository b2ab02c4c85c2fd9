import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT  # expect: forward-overflow
        return (scores / self.width**0.5).softmax(-1) @ x


torch.manual_seed(3)
model = Attention(24)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for _ in range(4):
    x = torch.randn(2, 5, 24) * 180
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).float() - x).abs().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
