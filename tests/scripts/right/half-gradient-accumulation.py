"""Many micro-batches whose sums are kept in FP32: under autocast, and in buffers beside a BF16 model."""
import torch
from torch import nn

torch.manual_seed(0)
A = 32
net = nn.Linear(8, 8)
opt = torch.optim.SGD(net.parameters(), lr=0.5)
for _ in range(2):
    for _ in range(A):
        x = torch.randn(2, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
        (nn.functional.mse_loss(out.float(), x) / A).backward()
    opt.step()
    opt.zero_grad()

half = nn.Linear(8, 8).to(torch.bfloat16)
master = [p.detach().float().clone().requires_grad_(True) for p in half.parameters()]
opt = torch.optim.AdamW(master, lr=1e-3)
for _ in range(2):
    for m in master:
        m.grad = torch.zeros_like(m)
    for _ in range(A):
        x = torch.randn(2, 8, dtype=torch.bfloat16)
        (nn.functional.mse_loss(half(x), x).float() / A).backward()
        for p, m in zip(half.parameters(), master):
            m.grad += p.grad.float()
            p.grad = None
    opt.step()
    with torch.no_grad():
        for p, m in zip(half.parameters(), master):
            p.copy_(m)
