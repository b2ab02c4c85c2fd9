import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 1)

    def forward(self, x):
        return self.net(x).sigmoid()


torch.manual_seed(0)
model, criterion = Detector(), nn.BCELoss()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for _ in range(5):
    x = torch.randn(48, 6) * 14
    y = (x[:, :1] > 0).float()
    with torch.autocast("cpu", dtype=torch.float16):
        p = model(x)
    loss = criterion(p.float(), y)  # expect: saturated-half-probabilities
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
