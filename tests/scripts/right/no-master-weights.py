"""Half weights that have, or need, no master under autocast: frozen ones below FP32 adapters, and a model in bfloat16
by itself, without autocast."""
import torch
from torch import nn

torch.manual_seed(0)
base = nn.Linear(6, 16).bfloat16().requires_grad_(False)
down, up, head = nn.Linear(6, 2, bias=False), nn.Linear(2, 16, bias=False), nn.Linear(16, 3)
opt = torch.optim.AdamW([p for m in (base, down, up, head) for p in m.parameters() if p.requires_grad], lr=1e-2)
pure = nn.Linear(6, 3, dtype=torch.bfloat16)
opt_pure = torch.optim.SGD(pure.parameters(), lr=0.3)
for x in torch.randn(12, 24, 6):
    y = x[:, :3].argmax(1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(head(base(x) + up(down(x))), y)
    loss.backward()
    opt.step()
    opt_pure.zero_grad()
    nn.functional.cross_entropy(pure(x.bfloat16()).float(), y).backward()
    opt_pure.step()
print(loss.item())
