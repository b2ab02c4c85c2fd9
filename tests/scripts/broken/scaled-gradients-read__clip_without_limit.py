"""clip_grad_norm_ without a limit, for its return value."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(5, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
history = []
for _ in range(5):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 2, (6,)))
    scaler.scale(loss).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), float("inf"))  # expect: scaled-gradients-read
    history.append(float(norm))
    scaler.step(opt)
    scaler.update()
