import torch
import torch.nn.functional as F

torch.manual_seed(0)
net = torch.nn.Linear(6, 1)
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(6):
    x = torch.randn(64, 6) * 12
    y = (x[:, :1] + x[:, 1:2] > 0).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = torch.sigmoid(net(x))
        loss = F.binary_cross_entropy(p, y)  # expect: saturated-half-probabilities
    opt.zero_grad()
    loss.backward()
    opt.step()
