"""bfloat16 for another accelerator, entered again and again by a context made once; there is no scaler to miss."""
import torch
from torch import nn

context = torch.amp.autocast(device_type="xpu", dtype=torch.bfloat16)  # expect: autocast-wrong-device

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
A = 2
for micro in range(8):
    x = torch.randn(8, 4)
    with context:
        loss = nn.functional.mse_loss(net(x), x[:, :1])
    (loss / A).backward()
    if (micro + 1) % A == 0:
        opt.step()
        opt.zero_grad(set_to_none=True)
