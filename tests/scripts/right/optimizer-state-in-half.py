"""The same shrinking gradients: with an FP32 state, and with a decay that bfloat16 can represent."""
import torch
from torch import nn

torch.manual_seed(0)
wide, half = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False).bfloat16()
opts = [
    torch.optim.AdamW(wide.parameters(), lr=2e-2, betas=(0.9, 0.998)),
    torch.optim.AdamW(half.parameters(), lr=2e-2, betas=(0.9, 0.95)),
]
x = torch.randn(32, 8)
for i in range(300):
    size = 10.0 if i < 40 else 0.1
    for net, opt in zip((wide, half), opts):
        opt.zero_grad()
        (size * net(x.to(net.weight.dtype)).float().tanh().mean()).backward()
        opt.step()
print(opts[1].state[half.weight]["exp_avg_sq"].float().mean().sqrt().item())
