"""The schedule waits for updates that were applied; a schedule of epochs and one that follows the data do not care."""
import torch
from torch import nn

torch.manual_seed(0)
model, other = nn.Linear(4, 1), nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
second = torch.optim.SGD(other.parameters(), lr=1e-2)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
per_epoch = torch.optim.lr_scheduler.StepLR(second, 1, 0.5)
restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(second, 2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

for epoch, part in enumerate(torch.randn(3, 4, 8, 4)):
    for i, x in enumerate(part):
        optimizer.zero_grad()
        second.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), x[:, :1]) + other(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.step(second)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            warm.step()
        restarts.step(epoch + i / 4)
    per_epoch.step()
print(warm.last_epoch)
