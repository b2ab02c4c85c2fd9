"""Values cut at 0.5 while every element is 4096 times itself."""

import torch
import torch.nn.functional as F

torch.manual_seed(1)
weight = torch.nn.Parameter(torch.randn(4, 7) * 0.3)
optimizer = torch.optim.SGD([weight], lr=0.2)
scaler = torch.amp.GradScaler(device="cpu", init_scale=4096.0)


def closeness(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return F.mse_loss(F.linear(x, weight), y)


for _ in range(6):
    x, y = torch.randn(9, 7), torch.randn(9, 4)
    weight.grad = None
    scaler.scale(closeness(x, y)).backward()
    torch.nn.utils.clip_grad_value_([weight], 0.5)  # expect: clip-scaled-gradients
    scaler.step(optimizer)
    scaler.update()
