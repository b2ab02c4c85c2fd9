"""Precision is not to blame here: the learning rate is too high, and FP32 diverges just the same.

In FP16 it looks like an overflow: the loss becomes inf, updates are skipped, the loss scale falls and falls.

    halfstep compare examples/compare/high_rate.py
"""

import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(512, 32)
targets = inputs @ torch.randn(32, 4)

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # 0.05 converges
scaler = torch.amp.GradScaler("cpu")

for update in range(40):
    batch = torch.randint(0, len(inputs), (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(inputs[batch])
    loss = nn.functional.mse_loss(predicted.float(), targets[batch])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if update % 10 == 9:
        print(f"update {update + 1} loss {loss.item():.2e}")
