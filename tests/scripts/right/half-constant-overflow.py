import torch
from torch import nn

# Fills from the dtype; a -1e9 that becomes -inf and masks no whole row; bounds that fit.
torch.manual_seed(0)
project = nn.Linear(16, 32)
opt = torch.optim.SGD(project.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(3):
    x = torch.randn(2, 5, 16)
    whole = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)[:, None]
    with torch.autocast("cpu", dtype=torch.float16):
        q, k = project(x).chunk(2, -1)
        future = torch.ones(5, 5, dtype=torch.bool).triu(1)
        scores = (q @ k.mT).clamp(-3e4, 3e4)
        out = torch.where(future, -1e9, scores).softmax(-1) @ q
        bias = (future * -1e9).to(q.dtype).nan_to_num(nan=0.0)
        out = out + (scores + bias).softmax(-1) @ q
        out = out + scores.masked_fill(~whole, torch.finfo(scores.dtype).min).softmax(-1) @ k
    loss = out.float().square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
