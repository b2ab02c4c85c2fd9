"""The auxiliary loss goes backward unscaled, and step() divides it by the scale with the rest."""

import torch
from torch import nn

torch.manual_seed(0)
body, main, aux = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 1)
opt = torch.optim.AdamW([*body.parameters(), *main.parameters(), *aux.parameters()])
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = body(x).relu()
        first = nn.functional.cross_entropy(main(hidden), y)
        second = nn.functional.mse_loss(aux(hidden), x[:, :1])
    scaler.scale(first).backward(retain_graph=True)

    second.backward()  # expect: fp16-without-scaler

    scaler.step(opt)
    scaler.update()
