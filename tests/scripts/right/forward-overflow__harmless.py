import torch
from torch import nn
import torch.nn.functional as F

# x**3 leaves float16 and tanh is 1 of it, as it would be of the true value; a clamp hides another one.
torch.manual_seed(2)
inner, outer = nn.Linear(16, 16), nn.Linear(16, 2)
opt = torch.optim.SGD([*inner.parameters(), *outer.parameters()], lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        x = inner(torch.randn(8, 16) * 60)
        x = 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))
        size = (x.detach() * 1000).clamp(max=50.0)
        loss = F.cross_entropy(outer(x), torch.randint(0, 2, (8,))) + 0.0 * size.float().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
