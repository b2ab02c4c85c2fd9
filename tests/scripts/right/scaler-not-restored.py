"""The scale is among what the checkpoint holds: once by its state, once as a plain number."""

import io

import torch
from torch import nn


def build(scale: float = 2.0**14) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=scale)


def train(net: nn.Module, opt: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> dict[str, object]:
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(torch.randn(6, 4)), torch.randint(0, 2, (6,)))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    file = io.BytesIO()
    state = {"net": net.state_dict(), "opt": opt.state_dict(), "amp": scaler.state_dict(), "scale": scaler.get_scale()}
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


checkpoint = train(*build())
net, opt, scaler = build()
net.load_state_dict(checkpoint["net"])
opt.load_state_dict(checkpoint["opt"])
scaler.load_state_dict(checkpoint["amp"])
checkpoint = train(net, opt, scaler)
net, opt, scaler = build(checkpoint["scale"])
net.load_state_dict(checkpoint["net"])
opt.load_state_dict(checkpoint["opt"])
train(net, opt, scaler)
