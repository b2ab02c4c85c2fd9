"""The first attempts overflow and are skipped; warm-up goes on without them."""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)


def training_step(x):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    scaler.scale(nn.functional.mse_loss(out.float(), x[:, :1])).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    warm.step()  # expect: scheduler-on-skipped-update


for batch in torch.randn(12, 8, 4):
    training_step(batch)
print(warm.get_last_lr())
