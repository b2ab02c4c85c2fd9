"""Each phase of the curriculum makes a scaler of its own for the optimizer it was handed."""

import torch
from torch import nn

torch.manual_seed(0)


def phase(net: nn.Module, opt: torch.optim.Optimizer, length: int) -> None:
    amp = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # expect: scaler-recreated
    for _ in range(8):
        x = torch.randn(8, length)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x.mean(1, keepdim=True)), 50 * x[:, :1])
        amp.scale(loss).backward()
        amp.step(opt)
        amp.update()
        opt.zero_grad()


model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for length in (2, 4, 8):
    phase(model, optimizer, length)
