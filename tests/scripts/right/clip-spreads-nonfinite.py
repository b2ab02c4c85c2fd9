import torch
from torch import nn

# The same accident: once the norm is looked at, once clipping raises and the update is left out.
torch.manual_seed(0)
body, size = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), nn.Linear(6, 3)
params = [*body.parameters(), *size.parameters()]
opt = torch.optim.AdamW(params, lr=1e-3)
for i in range(9):
    x = torch.randn(8, 6)
    lengths = size(x) * (0.0 if i in (3, 6) else 1.0)
    loss = body(x).square().mean() + lengths.square().sum(1).sqrt().mean()
    opt.zero_grad()
    loss.backward()
    if i < 5:
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        if torch.isfinite(norm):
            opt.step()
        continue
    try:
        nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    except RuntimeError:
        continue
    opt.step()
