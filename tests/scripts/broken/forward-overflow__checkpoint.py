import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Cubes(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        y = self.mix(x)
        return y**3  # expect: forward-overflow


torch.manual_seed(1)
body, head = Cubes(), nn.Linear(8, 1)
opt = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
for _ in range(4):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        h = checkpoint(body, torch.randn(6, 8) * 90, use_reentrant=False)
        loss = head(h).float().abs().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
