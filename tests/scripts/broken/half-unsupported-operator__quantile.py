import torch

torch.manual_seed(0)
net = torch.nn.Linear(6, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(torch.randn(16, 6))
    bound = out.detach().abs().quantile(0.9)  # expect: half-unsupported-operator
    loss = out.clamp(-bound, bound).float().square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
