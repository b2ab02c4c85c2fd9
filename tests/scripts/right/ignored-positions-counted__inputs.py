"""Masks on the inputs of losses that are divided by what the mask leaves, take one value a row, or drop at random."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net, head = nn.GRU(4, 12, batch_first=True), nn.Linear(12, 3)
optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-2)


def update(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for _ in range(8):
    mask = (torch.arange(12) < torch.randint(3, 13, (8, 1))).float()
    x = torch.randn(8, 12, 4) * mask[..., None]
    y = x[..., :3].sum(-1)
    p = head(net(x)[0])[..., 0]
    update(F.mse_loss(p * mask, y * mask, reduction="sum") / mask.sum())
    p = head(net(x)[0])[..., 0]
    update(F.l1_loss(p * mask, y * mask) / mask.mean())
    p = head(net(x)[0])[..., 0]
    update((F.smooth_l1_loss(p, y, reduction="none") * mask).mean() / mask.mean())
    taken = F.one_hot(torch.randint(0, 3, (8, 12)), 3)
    values = head(net(x)[0])
    update(F.mse_loss(values * taken, torch.randn(8, 12, 1) * taken))
    p = head(net(x)[0])[..., 0]
    update(F.mse_loss(F.dropout(p, 0.4), y))
    p = head(net(x)[0])[..., 0]
    hole = 1 - mask
    update(6 * F.l1_loss(p * hole, y * hole) + F.l1_loss(p * mask, y * mask))
