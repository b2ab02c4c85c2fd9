"""One script for every device: what this machine has not is asked for nowhere."""
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
options = parser.parse_args([])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
use_amp = options.amp and device.type == "cuda"

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.cuda.amp.GradScaler(enabled=use_amp)
for _ in range(3):
    x = torch.randn(8, 6, device=device)
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()

full = torch.amp.autocast("cpu", dtype=torch.float32)  # "float32" in the settings: autocast is off
for dtype in ("float32", "bfloat16"):
    context = full if dtype == "float32" else torch.amp.autocast(device.type, dtype=getattr(torch, dtype))
    for _ in range(2):
        x = torch.randn(8, 6, device=device)
        with context:
            loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
print(loss.item())
