"""Regions around loops that are right: no cache, the cache cleared, nothing trained inside."""
import torch
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
batches = [torch.randn(8, 5) for _ in range(4)]

with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
    for x in batches:
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
        opt.step()

with torch.autocast("cpu", dtype=torch.bfloat16):
    for x in batches:
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
        opt.step()
        torch.clear_autocast_cache()

for x in batches:
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long())
    loss.backward()
    opt.step()

with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    net.eval()
    right = sum(int((net(x).argmax(1) == (x[:, 0] > 0)).sum()) for x in batches)
print(right)
