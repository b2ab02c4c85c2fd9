import torch
import torch.nn.functional as F

torch.manual_seed(0)
net = torch.nn.Linear(32, 900)
opt = torch.optim.SGD(net.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for _ in range(3):
    x = torch.randn(16, 32)
    goal = (torch.randn(16, 900) * 3).half()
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(x)
    loss = F.mse_loss(guess, goal, reduction="sum") / len(x)  # expect: half-reduction-overflow
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
