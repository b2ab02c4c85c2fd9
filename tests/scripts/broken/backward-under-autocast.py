"""The head is kept in FP32, and the region that is left too late computes its gradient in half."""
import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU())
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        features = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(features.float())


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def update(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.smooth_l1_loss(self.model(x), y)
            loss.backward()  # expect: backward-under-autocast
        self.optimizer.step()
        return loss.item()


torch.manual_seed(5)
trainer = Trainer(Regressor(), 1e-3)
for _ in range(5):
    x = torch.randn(16, 7)
    print(trainer.update(x, x[:, :2] * 3))
