"""Each optimizer's loss goes backward after the other's update: no gradient waits while the scale moves."""

import torch
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Linear(6, 4), nn.Linear(4, 6)
a, b = torch.optim.Adam(encoder.parameters(), lr=1e-2), torch.optim.Adam(decoder.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_interval=2)
for _ in range(5):
    x = torch.randn(7, 6)
    for opt, frozen in ((a, decoder), (b, encoder)):
        a.zero_grad()
        b.zero_grad()
        for p in frozen.parameters():
            p.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(decoder(encoder(x).relu()), x)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        for p in frozen.parameters():
            p.requires_grad_(True)
