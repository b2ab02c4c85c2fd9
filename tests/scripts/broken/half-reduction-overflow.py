import torch
from torch import nn


def dice_loss(p, target, smooth=1.0):
    overlap = (p * target).sum()
    area = p.sum() + target.sum()  # expect: half-reduction-overflow
    return 1 - (2 * overlap + smooth) / (area + smooth)


torch.manual_seed(0)
net = nn.Conv2d(1, 1, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _ in range(2):
    image = torch.randn(3, 1, 220, 220)
    target = (image > -3).half()
    with torch.autocast("cpu", dtype=torch.float16):
        p = net(image).sigmoid()
    loss = dice_loss(p, target)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
