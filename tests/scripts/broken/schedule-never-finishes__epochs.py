"""T_max counts epochs, the call stands in the batch loop: the rate goes up and down all the time."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(80, 4)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=10)
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)  # expect: schedule-never-finishes
for epoch in range(5):
    for a, b in loader:
        opt.zero_grad()
        nn.functional.mse_loss(net(a), b).backward()
        opt.step()
        sched.step()
print(sched.get_last_lr())
