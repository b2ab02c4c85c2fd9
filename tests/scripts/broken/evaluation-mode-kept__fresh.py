"""A helper builds the model in evaluation mode; it is trained from scratch without train()."""
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
    return model.eval()  # expect: evaluation-mode-kept


torch.manual_seed(2)
model = build()
optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(8):
    images = torch.randn(16, 1, 8, 8)
    target = (images.mean((1, 2, 3)) > 0).long()
    optim.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(images), target)
    loss.backward()
    optim.step()
print(loss.item())
