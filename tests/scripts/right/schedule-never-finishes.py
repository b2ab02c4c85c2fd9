"""Lengths that fit, or need not: per epoch, warm-up then cosine, a warm-up alone, a run that was stopped early."""
import torch
from torch import nn

torch.manual_seed(0)
EPOCHS, ACCUMULATE = 4, 2
data = torch.randn(12, 8, 6)
updates = EPOCHS * len(data) // ACCUMULATE
S = torch.optim.lr_scheduler
nets = [nn.Linear(6, 1) for _ in range(5)]
opts = [torch.optim.SGD(n.parameters(), lr=0.05) for n in nets]
per_update = [
    S.SequentialLR(opts[0], [S.LinearLR(opts[0], 0.1, total_iters=4), S.CosineAnnealingLR(opts[0], updates - 4)], [4]),
    S.LinearLR(opts[1], start_factor=0.2, total_iters=3),
    S.CosineAnnealingLR(opts[2], T_max=1000),
    S.CyclicLR(opts[3], 0.01, 0.1, step_size_up=3),
]
per_epoch = S.CosineAnnealingLR(opts[4], T_max=EPOCHS)
for epoch in range(EPOCHS):
    for i, x in enumerate(data, 1):
        for net in nets:
            (nn.functional.mse_loss(net(x), x[:, :1]) / ACCUMULATE).backward()
        if i % ACCUMULATE == 0:
            for opt in opts:
                opt.step()
                opt.zero_grad()
            for schedule in per_update:
                schedule.step()
    per_epoch.step()
print([o.param_groups[0]["lr"] for o in opts])
