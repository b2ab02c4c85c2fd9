import torch
from torch import nn

torch.manual_seed(0)
project = nn.Linear(12, 24)
opt = torch.optim.SGD(project.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)


def attend(q, k, hidden):
    scores = q @ k.transpose(1, 2)
    scores[hidden] = -1e10  # expect: half-constant-overflow
    return torch.softmax(scores, dim=-1) @ k


for _ in range(3):
    hidden = torch.zeros(2, 4, 4, dtype=torch.bool)
    hidden[0, 1] = True
    with torch.autocast("cpu", dtype=torch.float16):
        q, k = project(torch.randn(2, 4, 12)).chunk(2, -1)
        loss = attend(q, k, hidden).float().square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
