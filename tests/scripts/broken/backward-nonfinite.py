import torch
from torch import nn


class Angles(nn.Module):
    def forward(self, a, b):
        cos = nn.functional.cosine_similarity(a, b, dim=-1).clamp(-1.0, 1.0)
        return torch.acos(cos)  # expect: backward-nonfinite


torch.manual_seed(0)
net, angles = nn.Linear(6, 4), Angles()
opt = torch.optim.Adam(net.parameters())
for _ in range(4):
    x = torch.eye(6)[:, :].repeat(2, 1)
    z = net(x)
    other = z.detach().clone()
    other[0] *= -1.0
    loss = angles(z, other).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
