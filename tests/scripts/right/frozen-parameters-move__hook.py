"""Hooks that clamp, random masks that drop, dead units, and a layer given a group without decay: nothing is frozen."""
import torch
from torch import nn

torch.manual_seed(4)
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
with torch.no_grad():
    net[0].bias[:4] = -50.0  # dead units: their gradient is zero, and decay may shrink them
for p in net.parameters():
    p.register_hook(lambda grad: grad.clamp(-1, 1))
still = torch.ones(6, 16)
still[:2] = 0
opt = torch.optim.AdamW(
    [
        {"params": [*net[0].parameters(), *net[4].parameters()]},
        {"params": net[2].parameters(), "weight_decay": 0.0},
    ],
    lr=5e-3,
)
for _ in range(10):
    x = torch.randn(24, 5)
    opt.zero_grad()
    nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
    net[4].weight.grad.mul_(torch.rand(3, 6) > 0.5)
    net[2].weight.grad.mul_(still)
    opt.step()
print(net[0].weight.norm().item())
