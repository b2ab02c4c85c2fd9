import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
tokens = torch.tensor(0.0, dtype=torch.float16)
for _ in range(30):
    length = torch.randint(100, 140, (8,))
    mask = torch.arange(140) < length[:, None]
    loss = net(torch.randn(8, 4)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    for row in mask.view(-1, 14):
        tokens = tokens + row.any().half()  # expect: low-precision-accumulator
