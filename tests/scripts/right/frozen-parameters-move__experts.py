"""Experts that get no token in some updates, gradients zeroed and not dropped: idle for a while, not frozen."""
import torch
from torch import nn

torch.manual_seed(6)
experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
out = nn.Linear(4, 1)
opt = torch.optim.AdamW([*experts.parameters(), *out.parameters()], lr=1e-2)
for step in range(30):
    x = torch.randn(8, 4)
    opt.zero_grad(set_to_none=False)
    chosen = experts[step % 2 if step % 10 else 2]
    nn.functional.mse_loss(out(chosen(x)), x.sum(1, keepdim=True)).backward()
    opt.step()
print(out.weight.norm().item())
