"""A scaler for each fold, because each fold is a run of its own; one more takes the scale of the one before."""

import torch
from torch import nn


def steps(net: nn.Module, opt: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    for _ in range(6):
        x = torch.randn(8, 3)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x), 50 * x[:, :1])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


torch.manual_seed(0)
for fold in range(3):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    steps(model, optimizer, scaler)
steps(model, optimizer, torch.amp.GradScaler("cpu", init_scale=scaler.get_scale(), growth_interval=50))
