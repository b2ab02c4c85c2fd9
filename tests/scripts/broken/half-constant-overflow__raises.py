import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(16, 8)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(torch.randn(4, 16))
        floor = torch.finfo(torch.float32).min
        banned = torch.zeros(4, 8, dtype=torch.bool)
        banned[:, 0] = True
        logits = logits.masked_fill(banned, floor)  # expect: half-constant-overflow
        loss = nn.functional.cross_entropy(logits, torch.ones(4, dtype=torch.long))
    opt.zero_grad()
    loss.backward()
    opt.step()
