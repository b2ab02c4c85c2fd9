import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
model.half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # expect: epsilon-underflow
for _ in range(3):
    x, y = torch.randn(16, 12).half(), torch.randint(0, 3, (16,))
    loss = nn.functional.cross_entropy(model(x).float() * 0.05, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
