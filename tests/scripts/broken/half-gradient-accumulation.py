"""BF16 parameters hold BF16 gradients; 64 contributions are summed in them."""
import torch
from torch import nn

torch.manual_seed(0)
A = 64
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(torch.bfloat16)
opt = torch.optim.SGD(net.parameters(), lr=1.0)
for update in range(2):
    for _ in range(A):
        x = torch.randn(2, 8, dtype=torch.bfloat16)
        loss = nn.functional.mse_loss(net(x), x)
        (loss / A).backward()  # expect: half-gradient-accumulation
    opt.step()
    opt.zero_grad()
