import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.main = nn.Linear(16, 1)
        self.side = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        h = self.trunk(x).tanh()
        drift = self.side(h) * 1e-4
        return self.main(h), (drift * drift).mean()  # expect: gradient-underflow


torch.manual_seed(0)
model = Model()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for _ in range(4):
    x = torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        out, drift = model(x)
    loss = (out.float() - x[:, :1]).square().mean() + 0.1 * drift.float()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
