"""The loss is meant to be FP32: the region is off, the logits that enter it are bfloat16, and nothing complains."""
import torch
import torch.nn.functional as F
from torch import nn


def criterion(logits, labels):
    with torch.autocast("cpu", enabled=False):
        logp = torch.log_softmax(logits, dim=-1)  # expect: autocast-off-needs-float
        picked = logp.gather(-1, labels[:, None])
        return -picked.mean()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for i in range(6):
    x = torch.randn(32, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(net(x), x[:, :4].argmax(1))
    loss.backward()
    opt.step()
print(loss.item())
