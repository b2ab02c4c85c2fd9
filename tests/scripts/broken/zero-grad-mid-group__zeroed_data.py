"""An old idiom, `p.grad.data.zero_()`, in the inner loop; scaled losses."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 10), nn.Sigmoid(), nn.Linear(10, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
x, y = torch.randn(24, 4, 6), torch.randint(0, 2, (24, 4))


def clear(module):
    for p in module.parameters():
        if p.grad is not None:
            p.grad.data.zero_()  # expect: zero-grad-mid-group


for i in range(24):
    clear(net)  # expect: zero-grad-mid-group
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x[i]), y[i]) / 4
    scaler.scale(loss).backward()
    if (i + 1) % 4 == 0:
        scaler.step(opt)
        scaler.update()
