"""Gradients shrink a hundredfold after the first updates; Adam's second moment, in bfloat16, cannot follow them."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 4, bias=False).bfloat16()
opt = torch.optim.AdamW(net.parameters(), lr=2e-2, betas=(0.9, 0.998))  # expect: optimizer-state-in-half
x = torch.randn(32, 8).bfloat16()
for i in range(600):
    size = 10.0 if i < 40 else 0.1
    opt.zero_grad()
    (size * net(x).float().tanh().mean()).backward()
    opt.step()
print(opt.state[net.weight]["exp_avg_sq"].float().mean().sqrt().item())
