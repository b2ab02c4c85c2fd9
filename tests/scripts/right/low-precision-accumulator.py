import torch
from torch import nn

# Totals in float32 and Python; a half total of a few numbers; a residual stream of small steps; an average that decays.
torch.manual_seed(0)
net = nn.Linear(8, 8)
opt = torch.optim.SGD(net.parameters(), lr=1e-5)
total, plain, smooth = torch.zeros(()), 0.0, torch.zeros((), dtype=torch.bfloat16)
for _ in range(120):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream = torch.ones(4, 8, dtype=torch.bfloat16)
        for _ in range(3):
            stream = stream + net(stream) * 1e-4
        parts = torch.zeros((), dtype=torch.bfloat16)
        for row in stream:
            parts = parts + row.mean()
    loss = parts.float()
    total += loss.detach()
    plain += loss.item()
    smooth = smooth * 0.9 + loss.detach().bfloat16() * 0.1
    opt.zero_grad()
    loss.backward()
    opt.step()
