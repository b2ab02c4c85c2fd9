"""The model is bfloat16 already, autocast around it changes nothing: nowhere is there an FP32 weight."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
net = net.to(torch.bfloat16)  # expect: no-master-weights
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for x in torch.randn(14, 24, 6):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
    loss.backward()
    opt.step()
print(loss.item())
