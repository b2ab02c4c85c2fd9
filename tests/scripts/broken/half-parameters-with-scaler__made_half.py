"""One layer is made in float16 from the start; clipping unscales first."""

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2, dtype=torch.float16)  # expect: half-parameters-with-scaler

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x).relu())


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(5, 4)), torch.randint(0, 2, (5,)))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
