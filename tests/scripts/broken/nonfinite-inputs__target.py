import torch
import torch.nn.functional as F

torch.manual_seed(4)
features = torch.randn(60, 3)
prices = features.sum(1, keepdim=True)
prices[33] = float("inf")
model = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for idx in torch.arange(60).split(12):
    with torch.autocast("cpu", dtype=torch.float16):
        guess = model(features[idx])
        loss = F.mse_loss(guess.float(), prices[idx])  # expect: nonfinite-inputs
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
