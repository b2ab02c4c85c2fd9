"""Elements clamped through .data, one parameter after the other."""

import torch

torch.manual_seed(4)
net = torch.nn.Linear(5, 3)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(5):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(torch.randn(8, 5))
        loss = (out - 1).abs().mean()
    scaler.scale(loss).backward()
    for p in net.parameters():
        p.grad.data.clamp_(-1, 1)  # expect: clip-scaled-gradients
    scaler.step(opt)
    scaler.update()
