"""Precision is to blame here: the targets are small and many, so the gradients of the loss are too small for FP16.

The sag of 64 beams at 1,024 points each, in metres: a millimetre or so. The mean over 65,536 points divides each
point's gradient by as much; 3e-8 is left, and FP16 ends at 6e-8. Nothing is scaled, most of it rounds to zero, and the
loss hardly moves, while FP32 goes on.

    halfstep compare examples/compare/small_gradients.py
"""

import torch
from torch import nn

torch.manual_seed(0)
loads = torch.rand(64, 8)
shapes = torch.sin(torch.outer(torch.arange(8.0) + 1, torch.linspace(0, 3, 1024)))
sag = 1e-3 * loads @ shapes

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1024))
nn.init.zeros_(model[2].weight)
nn.init.zeros_(model[2].bias)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=1e-5)

for update in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(loads)
    loss = nn.functional.mse_loss(predicted.float(), sag)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if update % 10 == 9:
        print(f"update {update + 1} error {loss.sqrt().item():.6f} m")
