"""Zeros in gradients that freeze nothing: weights pruned to zero, the largest tenth of a gradient, random drops."""
import torch
from torch import nn

torch.manual_seed(1)
pruned = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
sparse = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
opt = torch.optim.SGD(pruned.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
opt_sparse = torch.optim.AdamW(sparse.parameters(), lr=1e-2)
masks = [(p.abs() > p.abs().median()).float() for p in pruned.parameters()]
with torch.no_grad():
    for p, mask in zip(pruned.parameters(), masks):
        p.mul_(mask)
for i in range(14):
    x = torch.randn(16, 6)
    opt.zero_grad()
    opt_sparse.zero_grad()
    nn.functional.mse_loss(pruned(x), x[:, :1]).backward()
    nn.functional.mse_loss(sparse(x), x[:, :1]).backward()
    for p, mask in zip(pruned.parameters(), masks):
        p.grad.mul_(mask)
    for p in sparse.parameters():
        least = p.grad.abs().flatten().topk(max(1, p.numel() // 10)).values[-1]
        p.grad.mul_((p.grad.abs() >= least).float())
        p.grad[torch.rand(p.shape) < 0.1] = 0
    opt.step()
    opt_sparse.step()
print(pruned[0].weight.count_nonzero().item())
