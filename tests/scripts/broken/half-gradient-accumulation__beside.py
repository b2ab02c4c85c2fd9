"""FP32 weights are updated, yet gradients gather in the BF16 model beside them until the group is complete."""
import torch
from torch import nn

torch.manual_seed(0)
A = 48
net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).to(torch.bfloat16)
master = [p.detach().float().clone() for p in net.parameters()]
opt = torch.optim.AdamW(master, lr=1e-2)
for _ in range(2):
    for _ in range(A):
        x = torch.randn(2, 8, dtype=torch.bfloat16)
        loss = nn.functional.mse_loss(net(x), x)
        (loss / A).backward()  # expect: half-gradient-accumulation
    for m, p in zip(master, net.parameters()):
        m.grad = p.grad.float()
        p.grad = None
    opt.step()
    with torch.no_grad():
        for m, p in zip(master, net.parameters()):
            p.copy_(m)
