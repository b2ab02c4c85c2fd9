"""The validation loop has no_grad but never eval(): dropout stays on while the score is taken."""
import torch
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
train, valid = torch.randn(64, 8), torch.randn(32, 8)
for epoch in range(3):
    for xb in train.split(16):
        opt.zero_grad()
        nn.functional.mse_loss(net(xb), xb.sum(1, keepdim=True)).backward()
        opt.step()
    with torch.no_grad():
        total = 0.0
        for xb in valid.split(16):
            total += nn.functional.mse_loss(net(xb), xb.sum(1, keepdim=True)).item()  # expect: evaluation-mode-kept
    print(epoch, total / 2)
