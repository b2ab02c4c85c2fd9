"""float16 on the device that the data is on, but a scaler for another one: nothing is scaled."""
import warnings

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scaler = torch.amp.GradScaler(init_scale=1024.0)  # expect: autocast-wrong-device

torch.manual_seed(0)
net = nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(8, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
