"""A gradient penalty: the FP32 critic's gradient is asked for inside a region, and its second derivative with it."""
import torch
from torch import nn

torch.manual_seed(2)
encoder = nn.Linear(4, 8)
critic = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))
optimizer = torch.optim.Adam([*encoder.parameters(), *critic.parameters()], lr=1e-3)
for _ in range(4):
    x = torch.randn(12, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = encoder(x).float()
    score = critic(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slope = torch.autograd.grad(score.sum(), hidden, create_graph=True)[0]  # expect: backward-under-autocast
    loss = score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
