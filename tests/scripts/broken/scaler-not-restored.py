"""Model and optimizer come back from the checkpoint, the scale starts over."""

import io

import torch
from torch import nn


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=2.0**14)


def train(net: nn.Module, opt: torch.optim.Optimizer, scaler: torch.amp.GradScaler, updates: int) -> None:
    for _ in range(updates):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(torch.randn(6, 4)), torch.randint(0, 2, (6,)))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


net, opt, scaler = build()
train(net, opt, scaler, 3)
file = io.BytesIO()
torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "updates": 3}, file)

file.seek(0)
checkpoint = torch.load(file)
net, opt, scaler = build()
net.load_state_dict(checkpoint["net"])
opt.load_state_dict(checkpoint["opt"])  # expect: scaler-not-restored
train(net, opt, scaler, 3)
