"""A pool calls the module itself: the only line of the script's is the one that hands the work out."""
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
pool = ThreadPoolExecutor(2)
for _ in range(4):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = list(pool.map(net, x.split(8)))  # expect: autocast-lost-in-thread
        loss = nn.functional.cross_entropy(torch.cat(parts), (x[:, 0] > 0).long())
    loss.backward()
    opt.step()
pool.shutdown()
print(loss.item())
