import torch
from torch import nn

torch.manual_seed(0)
project = nn.Linear(16, 32)
opt = torch.optim.SGD(project.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(3):
    x = torch.randn(2, 5, 16)
    keep = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)[:, None]
    with torch.autocast("cpu", dtype=torch.float16):
        q, k = project(x).chunk(2, -1)
        scores = torch.where(keep, q @ k.mT, -1e9)  # expect: half-constant-overflow
        out = scores.softmax(-1) @ q
    loss = out.float().square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
