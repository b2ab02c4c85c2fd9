import torch
from torch import nn

# Bad batches are seen and dropped: before backward by the loss, after it by the norm.
torch.manual_seed(0)
net = nn.Linear(6, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
dropped = 0
for i in range(12):
    x = torch.randn(16, 6)
    if i in (4, 8):
        x[0, 0] = float("nan")
    opt.zero_grad()
    loss = (net(x) - x[:, 1:2]).square().mean()
    if i < 6 and not torch.isfinite(loss):
        dropped += 1
        continue
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if not torch.isfinite(norm):
        dropped += 1
        continue
    opt.step()
