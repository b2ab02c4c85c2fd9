"""The optimizer also owns the loss's own weights, which `model.zero_grad()` does not know of."""
import torch
from torch import nn

torch.manual_seed(0)


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, features, target):
        return nn.functional.cross_entropy(nn.functional.normalize(features) @ self.weight.T, target)


model, criterion = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)), Prototypes()
optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.05)
for _ in range(12):
    x = torch.randn(8, 6)
    model.zero_grad()  # expect: gradients-never-cleared
    criterion(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
