import torch
from torch import nn

# Positions in int64 and float32, their sines in bfloat16; pixels and short positions, which bfloat16 holds exactly.
torch.manual_seed(0)
embed, project = nn.Embedding(600, 8), nn.Linear(8, 8)
opt = torch.optim.SGD([*embed.parameters(), *project.parameters()], lr=0.01)
inverse = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        places = torch.arange(600)
        with torch.autocast("cpu", enabled=False):
            angles = places.float()[:, None] @ inverse[None]
        waves = torch.cat([angles.sin(), angles.cos()], -1).bfloat16()
        h = project(embed(places).bfloat16() + waves)
        near = torch.arange(200).bfloat16() / 200
        pixels = torch.randint(0, 256, (600, 8), dtype=torch.uint8).bfloat16() / 255
        level = torch.round(h.detach().float() * 1000).bfloat16()
        loss = (h - pixels).float().square().mean() + 0.0 * (near.float().mean() + level.float().mean())
    opt.zero_grad()
    loss.backward()
    opt.step()
