import torch
from torch import nn


def negative_log_likelihood(probabilities, labels):
    picked = probabilities[torch.arange(len(labels)), labels]
    return -picked.log().mean()  # expect: saturated-half-probabilities


torch.manual_seed(0)
net = nn.Linear(6, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for _ in range(5):
    x, y = torch.randn(32, 6) * 25, torch.randint(0, 4, (32,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = negative_log_likelihood(torch.softmax(net(x), dim=-1), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
