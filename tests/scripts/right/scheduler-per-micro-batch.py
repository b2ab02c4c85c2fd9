"""A one-cycle schedule as long as all micro-batches may move with each of them; the other moves with the updates."""
import torch
from torch import nn

torch.manual_seed(0)
EPOCHS, ACCUMULATE = 2, 4
data = torch.randn(16, 8, 5)
net, critic = nn.Linear(5, 1), nn.Linear(5, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
opt_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=EPOCHS * len(data))
decay = torch.optim.lr_scheduler.StepLR(opt_critic, step_size=3)
for epoch in range(EPOCHS):
    for i, x in enumerate(data, 1):
        loss = nn.functional.mse_loss(net(x), x[:, :1]) + nn.functional.mse_loss(critic(x), x[:, 1:2])
        (loss / ACCUMULATE).backward()
        if i % ACCUMULATE == 0:
            opt.step()
            opt_critic.step()
            opt.zero_grad()
            opt_critic.zero_grad()
            decay.step()
        cycle.step()
print(cycle.get_last_lr(), decay.get_last_lr())
