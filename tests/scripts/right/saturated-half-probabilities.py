import torch
import torch.nn.functional as F

# Losses on logits; a logarithm of clamped probabilities; half probabilities that are only counted and sampled from.
torch.manual_seed(0)
net = torch.nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for _ in range(4):
    x, y = torch.randn(32, 6) * 25, torch.randint(0, 3, (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        z = net(x)
        p = z.softmax(-1)
        loss = F.cross_entropy(z, y) + F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).float())
        loss = loss - 0.01 * (p.clamp(min=1e-4).log() * p).sum(-1).float().mean()
    right = (p.argmax(-1) == y).float().mean()
    drawn = torch.multinomial(p.detach().float(), 1)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
