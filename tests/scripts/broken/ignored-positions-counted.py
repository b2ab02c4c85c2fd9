"""A mask takes padded frames out of the sum, the mean still counts them."""
import torch
import torch.nn.functional as F
from torch import nn


def masked_loss(logits, target, mask):
    per_frame = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    per_frame = per_frame * mask
    return per_frame.mean()  # expect: ignored-positions-counted


torch.manual_seed(7)
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(6):
    frames = torch.randn(4, 12, 5)
    lengths = torch.randint(2, 12, (4,))
    mask = (torch.arange(12) < lengths[:, None]).float()
    target = (frames.sum(-1) > 0).float()
    opt.zero_grad()
    loss = masked_loss(net(frames).squeeze(-1), target, mask)
    loss.backward()
    opt.step()
