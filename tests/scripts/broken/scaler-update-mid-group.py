"""One optimizer is stepped with every micro-batch, the other with every fourth; update() comes each time."""

import torch
from torch import nn

torch.manual_seed(0)
body, head = nn.Linear(5, 8), nn.Linear(8, 1)
slow = torch.optim.SGD(body.parameters(), lr=0.01)
fast = torch.optim.SGD(head.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for number in range(1, 13):
    fast.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        x = torch.randn(6, 5)
        loss = nn.functional.mse_loss(head(body(x).relu()), x[:, :1])
    scaler.scale(loss).backward()
    scaler.step(fast)
    if number % 4 == 0:
        for p in body.parameters():
            p.grad.div_(4)
        scaler.step(slow)
        slow.zero_grad()
    scaler.update()  # expect: scaler-update-mid-group
