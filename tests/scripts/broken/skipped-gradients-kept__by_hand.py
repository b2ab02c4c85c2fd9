"""A guard of one's own leaves the loop before the clearing: NaN is added to every later gradient."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
skipped = 0
for it in range(10):
    x = torch.randn(6, 5)
    target = x.sum(1, keepdim=True)
    if it == 4:
        target[2] = float("inf")
    loss = nn.functional.mse_loss(net(x), target)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if not torch.isfinite(norm):  # expect: skipped-gradients-kept
        skipped += 1
        continue
    opt.step()
    opt.zero_grad()
