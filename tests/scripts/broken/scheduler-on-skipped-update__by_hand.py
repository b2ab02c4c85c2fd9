"""Batches with a non-finite norm are dropped by hand, but the schedule counts them."""
import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.97)
for i in range(24):
    x = torch.randn(8, 3)
    if i in (9, 15):
        x[0] = float("inf")
    opt.zero_grad()
    nn.functional.mse_loss(net(x), x[:, :1].nan_to_num(posinf=float("inf"))).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if torch.isfinite(norm):
        opt.step()
    schedule.step()  # expect: scheduler-on-skipped-update
print(schedule.get_last_lr())
