"""Averages once an update, once an epoch, of a target network; weights lent and given back; interpolation in a graph."""
import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

torch.manual_seed(0)
online = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 2))
target = copy.deepcopy(online)
shadow = {k: v.clone() for k, v in online.state_dict().items()}
swa = AveragedModel(online)
base = {k: v.detach().clone() for k, v in online.named_parameters()}
opt = torch.optim.Adam(online.parameters(), lr=1e-3)
for epoch in range(2):
    for group in torch.randn(4, 3, 10, 4):
        opt.zero_grad()
        for x in group:
            mixed = {k: 0.9 * v + 0.1 * base[k] for k, v in online.named_parameters()}
            out = torch.func.functional_call(online, mixed, (x,))
            (nn.functional.mse_loss(out, target(x).detach() + x[:, :2]) / len(group)).backward()
        opt.step()
        with torch.no_grad():
            for k, v in online.state_dict().items():
                shadow[k] = 0.9 * shadow[k] + (1 - 0.9) * v
            for old, new in zip(target.parameters(), online.parameters()):
                old.lerp_(new, 0.05)
    swa.update_parameters(online)
    kept = copy.deepcopy(online.state_dict())
    online.load_state_dict(shadow)
    with torch.no_grad():
        print(epoch, online(torch.ones(1, 4)))
    online.load_state_dict(kept)
