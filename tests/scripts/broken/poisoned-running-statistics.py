import torch
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def train_epoch(net, opt, scaler, epoch):
    net.train()
    for i in range(4):
        x, y = torch.randn(4, 1, 6, 6), torch.randint(0, 2, (4,))
        if (epoch, i) == (1, 2):
            x = x * 1e6
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)  # expect: poisoned-running-statistics
            loss = nn.functional.cross_entropy(logits, y)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


torch.manual_seed(0)
net = Small()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for epoch in range(3):
    train_epoch(net, opt, scaler, epoch)
    net.eval()
    with torch.no_grad():
        net(torch.randn(2, 1, 6, 6))
