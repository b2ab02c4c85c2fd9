"""Regions that are off and right: inputs cast, half precision on purpose, nothing trained, plain element-wise work."""
import copy

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.gate, self.mlp = nn.Linear(width, 1), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            gate = torch.sigmoid(self.gate(x.float()))
            x = x + self.norm(x.float()).to(x.dtype)
        return x + gate.to(x.dtype) * self.mlp(x)


torch.manual_seed(0)
enter, block, leave = nn.Linear(5, 12), Block(), nn.Linear(12, 4)
net = nn.Sequential(enter, block, leave)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
teacher = copy.deepcopy(net).bfloat16().eval()
for _ in range(5):
    x = torch.randn(16, 5)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
        with torch.autocast("cpu", enabled=False):
            with torch.no_grad():
                soft = F.softmax(teacher[0](x.bfloat16()), -1)
                seen = logits.softmax(-1).mean().item()
            loss = F.cross_entropy(logits.float(), x[:, :4].argmax(1))
            loss = loss + 0.01 * F.softmax(logits, -1, dtype=torch.float32).square().sum(-1).mean()
    loss.backward()
    opt.step()
print(loss.item(), seen, soft.dtype)
