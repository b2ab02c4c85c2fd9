"""A loss averaged over many positions leaves gradients that float16 cannot hold."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.5)


def micro_batch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return 1e-4 * nn.functional.mse_loss(net(x), y, reduction="sum") / y.numel()


for _ in range(4):
    opt.zero_grad()
    loss = micro_batch(torch.randn(256, 6), torch.randn(256, 4))
    loss.backward()  # expect: fp16-without-scaler
    opt.step()
