"""Warm-up is meant for 8 updates; it is called with every micro-batch and over after two."""
import torch
from torch import nn

torch.manual_seed(0)
ACCUMULATE = 4
net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / 8))
for i, x in enumerate(torch.randn(32, 8, 5)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(net(x), x[:, :1])
    (loss / ACCUMULATE).backward()
    if (i + 1) % ACCUMULATE == 0:
        opt.step()
        opt.zero_grad()
    warmup.step()  # expect: scheduler-per-micro-batch
print(opt.param_groups[0]["lr"])
