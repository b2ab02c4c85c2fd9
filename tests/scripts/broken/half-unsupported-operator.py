import torch
from torch import nn


class Whiten(nn.Module):
    def forward(self, h):
        cov = h.mT @ h / len(h) + torch.eye(4, dtype=h.dtype)
        root = torch.linalg.cholesky(cov)  # expect: half-unsupported-operator
        return h @ root.inverse()


torch.manual_seed(0)
mix, whiten = nn.Linear(6, 4), Whiten()
opt = torch.optim.SGD(mix.parameters(), lr=0.01)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = mix(torch.randn(16, 6))
    out = whiten(h)
    loss = out.float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
